"""Request and reply, events, and the borders where errors become messages."""

from __future__ import annotations

import asyncio

import pytest

from tinsmith.bus import Bus
from tinsmith.config import BusConfig
from tinsmith.errors import BrokerUnavailable, NoResponder, NotFound, ServerError, TooLarge
from tinsmith.messages import checkpoints, ops, services, table, texts

pytestmark = pytest.mark.integration

ASK = checkpoints.GetCheckpoint(path="p")
ANSWER = checkpoints.Checkpoint(
    path="p", model_id="m", kind="weights", name="n", op_seq=1, base_model="b",
    lora=ops.LoraShape(), step=0, parts={}, size_bytes=0, created_ns=0,
)  # fmt: skip


async def answer(request):
    assert request == ASK
    return ANSWER


async def test_a_call_returns_the_handlers_answer(bus):
    serving = await bus.serve(table.GET_CHECKPOINT, answer)

    assert await bus.call(table.GET_CHECKPOINT, ASK) == ANSWER
    await serving.close()


async def test_without_a_service_a_call_fails_at_once_and_names_it(bus):
    with pytest.raises(NoResponder, match="no checkpointer is running"):
        await bus.call(table.GET_CHECKPOINT, ASK)


async def test_an_error_of_the_handler_reaches_the_caller_as_itself(bus):
    async def missing(request):
        raise NotFound("path: there is no checkpoint p")

    serving = await bus.serve(table.GET_CHECKPOINT, missing)
    with pytest.raises(NotFound, match="no checkpoint p"):
        await bus.call(table.GET_CHECKPOINT, ASK)
    await serving.close()


async def test_an_unexpected_error_tells_the_caller_nothing_of_our_insides(bus):
    async def broken(request):
        raise KeyError("/secret/path")

    serving = await bus.serve(table.GET_CHECKPOINT, broken)
    with pytest.raises(ServerError, match="internal error") as caught:
        await bus.call(table.GET_CHECKPOINT, ASK)
    assert "secret" not in str(caught.value)
    await serving.close()


async def test_requests_are_served_side_by_side(bus):
    together = asyncio.Barrier(8)

    async def slow(request):
        await together.wait()
        return ANSWER

    serving = await bus.serve(table.GET_CHECKPOINT, slow)
    calls = [bus.call(table.GET_CHECKPOINT, ASK) for _ in range(8)]

    assert await asyncio.gather(*calls) == [ANSWER] * 8
    await serving.close()


async def test_closing_waits_for_answers_that_are_due(bus):
    asked, go = asyncio.Event(), asyncio.Event()

    async def slow(request):
        asked.set()
        await go.wait()
        return ANSWER

    serving = await bus.serve(table.GET_CHECKPOINT, slow)
    call = asyncio.create_task(bus.call(table.GET_CHECKPOINT, ASK))
    await asked.wait()
    closing = asyncio.create_task(serving.close())
    go.set()
    await closing

    assert await call == ANSWER


async def test_events_reach_every_listener(bus):
    heard = asyncio.Queue()
    first = await bus.listen(table.OP_DONE, heard.put_nowait)
    second = await bus.listen(table.OP_DONE, heard.put_nowait)
    await bus.emit(table.OP_DONE, ops.OpDone(model_id="m", seq=1))
    both = [await asyncio.wait_for(heard.get(), 5) for _ in range(2)]
    await first.close()
    await second.close()

    assert both == [ops.OpDone(model_id="m", seq=1)] * 2


async def test_an_unknown_event_is_skipped(bus):
    heard = asyncio.Queue()
    listening = await bus.listen(table.SESSION_ALIVE, heard.put_nowait)
    await bus._client.publish(table.SESSION_ALIVE.subject(), b"\x81\xa1t\xa7martian")
    await bus.emit(table.SESSION_ALIVE, services.SessionAlive(session_id="s"))

    assert (await asyncio.wait_for(heard.get(), 5)).session_id == "s"
    await listening.close()


async def test_a_missing_broker_is_named_with_the_remedy(blobs):
    config = BusConfig(url="nats://127.0.0.1:1", connect_timeout_s=0.5)

    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1.*TINSMITH_NATS_URL"):
        async with Bus.connect(config, name="x", blobs=blobs):
            pass


async def test_a_payload_that_only_fits_without_its_headers_is_refused_here(bus):
    """The broker would close the connection for good over it."""
    limit = bus._client.max_payload
    headers = {"Nats-Msg-Id": "x" * 200}
    from tinsmith.bus.wire import publish

    with pytest.raises(ServerError, match="max_payload"):
        await publish(bus._connection, "tinsmith.v1.reg.x.y", bytes(limit - 100), headers=headers)
    assert bus.is_connected


async def test_a_pools_question_reaches_that_pool_alone(bus):
    async def answer(request):
        return texts.PromptRendered(tokens=request.text.encode())

    serving = await bus.serve(table.TOKENIZE_TEXT, answer, pool="one")
    ask = texts.TokenizeText(text="hi")

    assert (await bus.call(table.TOKENIZE_TEXT, ask, pool="one")).tokens == b"hi"
    with pytest.raises(NoResponder, match="no sampler is running"):
        await bus.call(table.TOKENIZE_TEXT, ask, pool="two")
    await serving.close()


async def test_an_answer_that_the_broker_does_not_take_is_an_error_at_once(bus):
    async def much(request):
        return texts.PromptRendered(tokens=bytes(32 << 20))

    serving = await bus.serve(table.TOKENIZE_TEXT, much, pool="one")
    with pytest.raises(TooLarge, match="max_payload"):
        await bus.call(table.TOKENIZE_TEXT, texts.TokenizeText(text="hi"), pool="one")
    with pytest.raises(TooLarge, match="max_payload"):
        await bus.call(table.TOKENIZE_TEXT, texts.TokenizeText(text="a" * (32 << 20)), pool="one")
    await serving.close()
