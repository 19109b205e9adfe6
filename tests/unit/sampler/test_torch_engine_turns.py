"""Who waits in the torch engine, who gives way, and how everybody's wait ends."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.sampler.engines import bits, held, together, until
from tests.unit.sampler.examples import prompt, row, scoring

from tinsmith.errors import Gone, ServerError
from tinsmith_sampler.engine import EngineLoad
from tinsmith_sampler.tasks import RowTask

ENDLESS = row(prompt=prompt(5), max_tokens=2000, request_id="endless")


async def started(engine, asked=ENDLESS) -> asyncio.Task:
    """The task of a row that is being drawn."""
    task = asyncio.create_task(engine.generate(asked))
    await until(lambda: engine.load().running == 1)
    return task


async def test_more_rows_than_there_are_places_take_turns_and_all_finish(start, widths):
    rows = [row(prompt=prompt(n + 1, n), seed=n, max_tokens=12) for n in range(9)]
    async with start(max_rows=2) as engine:
        expected = [bits(await engine.generate(one)) for one in rows]
        seen = widths(engine)
        made = await together(engine, rows)

    assert max(seen) == 2
    assert [bits(one) for one in made] == expected


@pytest.mark.parametrize("length", [3, pytest.param(100, marks=pytest.mark.slow)])
async def test_more_tokens_than_there_is_room_for_take_turns_and_all_finish(
    start, monkeypatch, length
):
    """A row that is sent back draws the same bits again."""
    sent_back = []
    restart = RowTask.restart
    monkeypatch.setattr(RowTask, "restart", lambda task: (sent_back.append(task), restart(task)))
    rows = [row(prompt=prompt(length, n), seed=n, max_tokens=156) for n in range(6)]
    async with start(kv_tokens=512) as engine:
        expected = [bits(await engine.generate(one)) for one in rows]
        assert sent_back == []
        made = await together(engine, rows)

    assert sent_back
    assert [bits(one) for one in made] == expected


async def test_scores_beyond_the_room_there_is_take_turns_and_all_finish(start):
    asked = [scoring(prompt(250, n)) for n in range(6)]
    async with start(kv_tokens=512) as engine:
        expected = [(await engine.score(one)).logprobs[1:].tobytes() for one in asked]
        made = await asyncio.gather(*(engine.score(one) for one in asked))

    assert [one.logprobs[1:].tobytes() for one in made] == expected


async def test_the_longest_row_there_can_be_finishes_in_a_cache_full_of_old_prompts(start):
    async with start(kv_tokens=512) as engine:
        for n in range(5):
            await engine.generate(row(prompt=prompt(100, n), max_tokens=2))
        made = await engine.generate(row(prompt=prompt(100, 9), max_tokens=156))

    assert len(made.tokens) == 156


async def test_an_aborted_row_ends_with_gone_and_its_place_is_free(start):
    async with start(max_rows=1) as engine:
        running = await started(engine)
        waiting = asyncio.create_task(engine.generate(row(request_id="next")))
        engine.abort("endless")

        with pytest.raises(Gone, match="endless"):
            await running
        assert len((await waiting).tokens) == 8


async def test_an_abort_ends_all_rows_and_scores_of_its_request_and_no_others(engine):
    with held(engine):
        mine = [asyncio.create_task(engine.generate(row(request_id="x"))) for _ in range(3)]
        mine.append(asyncio.create_task(engine.score(scoring(prompt(9), request_id="x"))))
        other = asyncio.create_task(engine.generate(row(request_id="y")))
        await asyncio.sleep(0)  # all are in the queue
        engine.abort("x")

    outcomes = await asyncio.gather(*mine, return_exceptions=True)
    assert [type(one) for one in outcomes] == [Gone] * 4
    assert len((await other).tokens) == 8


async def test_an_abort_of_what_is_not_there_does_nothing(engine):
    engine.abort("nobody")

    assert len((await engine.generate(row())).tokens) == 8


async def test_a_cancelled_row_frees_its_place(start):
    async with start(max_rows=1) as engine:
        running = await started(engine)
        running.cancel()

        assert len((await engine.generate(row())).tokens) == 8
        await until(lambda: engine.load() == EngineLoad(running=0, queued=0, free_rows=1))


async def test_the_room_of_rows_that_ended_early_is_given_back(start):
    async with start(kv_tokens=512, max_rows=4) as engine:
        for n in range(20):
            asked = row(prompt=prompt(90, n), max_tokens=150, request_id="x")
            running = await started(engine, asked)
            engine.abort("x")
            with pytest.raises(Gone):
                await running
        made = await engine.generate(row(prompt=prompt(100), max_tokens=156))

    assert len(made.tokens) == 156


async def test_the_load_counts_what_runs_and_what_waits(start):
    async with start(max_rows=2) as engine:
        assert engine.load() == EngineLoad(running=0, queued=0, free_rows=2)

        rows = [asyncio.create_task(engine.generate(ENDLESS)) for _ in range(3)]
        await until(lambda: engine.load() == EngineLoad(running=2, queued=1, free_rows=0))
        engine.abort("endless")
        await asyncio.gather(*rows, return_exceptions=True)


async def test_a_fault_in_a_pass_ends_the_rows_of_that_pass_and_the_engine_goes_on(
    engine, monkeypatch
):
    def broken(pieces):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(engine._model, "decode", broken)
        with pytest.raises(ServerError, match="failed with RuntimeError"):
            await engine.generate(row())

    assert len((await engine.generate(row())).tokens) == 8


async def test_a_fault_in_a_prompts_pass_ends_its_tasks_and_leaves_no_half_prompt(
    engine, monkeypatch
):
    expected = await engine.generate(row(prompt=prompt(200)))
    other = row(prompt=prompt(200, 1))

    def broken(pieces):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(engine._model, "prefill", broken)
        outcomes = await asyncio.gather(
            engine.generate(other), engine.score(scoring(other.prompt)), return_exceptions=True
        )

    assert [type(one) for one in outcomes] == [ServerError] * 2
    assert (await engine.generate(other)).cached_tokens == 0
    assert bits(await engine.generate(row(prompt=prompt(200)))) == bits(expected)


@pytest.fixture
async def dead(engine):
    """An engine whose thread has died while a row was running, and that row."""
    running = await started(engine)

    def fault(batcher):
        raise MemoryError("no more")

    engine._mailbox.put(fault)
    await asyncio.gather(running, return_exceptions=True)
    return engine, running


async def test_when_the_thread_dies_what_is_pending_fails(dead):
    _, running = dead

    with pytest.raises(ServerError, match="died of MemoryError; restart the sampler"):
        await running


async def test_a_dead_engine_refuses_work_and_says_so_to_whoever_waits_for_its_end(dead):
    engine, _ = dead

    with pytest.raises(ServerError, match="MemoryError"):
        await engine.generate(row())
    with pytest.raises(ServerError, match="MemoryError"):
        await engine.score(scoring(prompt(5)))
    with pytest.raises(ServerError, match="MemoryError"):
        await engine.wait_ended()
    engine.abort("endless")
    await engine.close()


async def test_close_fails_what_runs_and_what_waits(start):
    async with start(max_rows=1) as engine:
        running = await started(engine)
        waiting = asyncio.create_task(engine.generate(row()))
        await until(lambda: engine.load().queued == 1)
        await engine.close()

        outcomes = await asyncio.gather(running, waiting, return_exceptions=True)
    assert [type(one) for one in outcomes] == [ServerError] * 2
    assert "shutting down" in str(outcomes[0])


async def test_a_closed_engine_refuses_work_and_closes_again(engine):
    ended = asyncio.create_task(engine.wait_ended())
    await engine.close()

    await ended
    with pytest.raises(ServerError, match="shutting down"):
        await engine.generate(row())
    await engine.close()
