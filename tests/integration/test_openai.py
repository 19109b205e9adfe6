"""OpenAI's own client against the real server: models, completions, chat, streams."""

from __future__ import annotations

import numpy as np
import openai
import pytest
from tests.integration.management.conftest import until
from tests.integration.steps import new_model, step
from tinker import types as T
from transformers import AutoTokenizer

MODEL = "tiny/llama"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
DRAW = {"model": MODEL, "seed": 3, "max_tokens": 24}


@pytest.fixture(scope="module")
def ai(server):
    with openai.OpenAI(
        base_url=f"{server.base_url}/v1", api_key=server.api_key, max_retries=0
    ) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return AutoTokenizer.from_pretrained(model_folder)


@pytest.fixture
def base(client):
    return client.create_sampling_client(base_model=MODEL).result()


def drawn(sampler, prompt, n=1, **params):
    """As the tinker client draws it, text without marks."""
    params = T.SamplingParams(**{"seed": 3, "max_tokens": 24, **params})
    return sampler.sample(T.ModelInput.from_ints(prompt), n, params).result().sequences


def text_of(tokenizer, tokens):
    return tokenizer.decode(tokens, skip_special_tokens=True)


def chat_prompt(tokenizer):
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def test_chat_is_what_the_tinker_client_draws_after_the_models_template(ai, base, tokenizer):
    prompt = chat_prompt(tokenizer)
    expected = drawn(base, prompt, 2)
    answer = ai.chat.completions.create(messages=CHAT, n=2, **DRAW)

    assert [one.message.content for one in answer.choices] == [
        text_of(tokenizer, one.tokens) for one in expected
    ]
    assert [one.finish_reason for one in answer.choices] == [one.stop_reason for one in expected]
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == sum(len(one.tokens) for one in expected)


def test_completions_take_texts_and_tokens_in_one_order(ai, base, tokenizer):
    texts = ["The sea is vast", "Once upon a time"]
    prompts = [tokenizer.encode(text) for text in texts]
    expected = [text_of(tokenizer, s.tokens) for p in prompts for s in drawn(base, p, 2)]
    answers = [ai.completions.create(prompt=p, n=2, **DRAW).choices for p in (texts, prompts)]

    assert [[one.text for one in choices] for choices in answers] == [expected] * 2
    assert [one.index for one in answers[0]] == [0, 1, 2, 3]
    assert ai.completions.create(prompt=prompts[0], **DRAW).choices[0].text == expected[0]


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_a_stream_is_the_whole_answer_in_many_parts(ai, temperature):
    """At 3.0 a byte-level model draws parts of characters all the time."""
    options = {**DRAW, "messages": CHAT, "n": 2, "max_tokens": 200, "temperature": temperature}
    whole = ai.chat.completions.create(**options)
    chunks = list(
        ai.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    texts, reasons, parts = ["", ""], [None, None], 0
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        parts += bool(choice.delta.content)

    assert texts == [one.message.content for one in whole.choices]
    assert reasons == [one.finish_reason for one in whole.choices]
    assert parts > 2  # several for each: they came while it was drawn
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_first_words_arrive_long_before_the_last(ai):
    """Its stream is closed at the first of them; a whole answer would have come at once."""
    with ai.completions.create(
        prompt="a", **{**DRAW, "max_tokens": 1500}, temperature=3.0, stream=True
    ) as stream:
        first = next(chunk for chunk in stream if chunk.choices[0].text)

    assert first.choices[0].finish_reason is None


def test_a_stop_string_ends_the_text_and_is_no_part_of_it(ai):
    free = ai.completions.create(prompt="The sea", **DRAW).choices[0].text
    stop = free[5:8]
    options = {"prompt": "The sea", "stop": [stop, "never there"], **DRAW}
    whole = ai.completions.create(**options)
    streamed = "".join(c.choices[0].text for c in ai.completions.create(**options, stream=True))

    assert whole.choices[0].text == streamed == free[: free.index(stop)]
    assert whole.choices[0].finish_reason == "stop"


def test_logprobs_are_the_tinker_clients(ai, base, tokenizer):
    (expected,) = drawn(base, chat_prompt(tokenizer), max_tokens=8)
    answer = ai.chat.completions.create(
        messages=CHAT, logprobs=True, top_logprobs=2, **{**DRAW, "max_tokens": 8}
    )
    content = answer.choices[0].logprobs.content
    spelled = b"".join(bytes(one.bytes) for one in content)

    np.testing.assert_allclose(
        [one.logprob for one in content], expected.logprobs[: len(content)], atol=1e-6
    )
    assert spelled.decode(errors="replace") == answer.choices[0].message.content
    assert all(len(one.top_logprobs) == 2 for one in content)


def test_streamed_logprobs_of_completions_are_those_of_the_whole(ai):
    options = {"prompt": "The sea", "logprobs": 1, **DRAW}
    whole = ai.completions.create(**options).choices[0].logprobs
    parts = [c.choices[0].logprobs for c in ai.completions.create(**options, stream=True)]

    assert [t for part in parts for t in part.tokens] == whole.tokens
    assert [o for part in parts for o in part.text_offset] == whole.text_offset
    assert [p for part in parts for p in part.token_logprobs] == whole.token_logprobs


def test_saved_weights_are_a_model_of_their_own(ai, client, tokenizer):
    model = new_model(client)
    for _ in range(4):
        step(model)
    path = model.save_weights_for_sampler("for-openai").result().path
    expected = drawn(
        client.create_sampling_client(model_path=path).result(), chat_prompt(tokenizer)
    )
    answer = ai.chat.completions.create(messages=CHAT, **{**DRAW, "model": path})

    assert answer.choices[0].message.content == text_of(tokenizer, expected[0].tokens)
    assert answer.model == path
    assert {MODEL, path} <= {one.id for one in ai.models.list()}
    assert [ai.models.retrieve(name).id for name in (path, MODEL)] == [path, MODEL]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_its_sample(ai, server, stream):
    """Whose id is told by that of the answer before it: they are numbered."""
    before = ai.completions.create(prompt="a", **DRAW).id
    options = {**DRAW, "prompt": "a", "max_tokens": 2000, "n": 32, "temperature": 3.0}
    if stream:
        with ai.completions.create(**options, stream=True) as chunks:
            next(iter(chunks))
    else:
        with pytest.raises(openai.APITimeoutError):
            ai.with_options(timeout=0.5).completions.create(**options)
    session, _, order, number = before.removeprefix("cmpl-").split("-")
    request = {"request_id": f"{session}:sample:{order}:{int(number) + 1}"}
    answer = until(lambda: _answered(server, request))

    assert answer["error"] == "cancelled by its client"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"min_p": 0.1}}, "min_p"),
        ({"extra_body": {"return_routed_experts": True}}, "return_routed_experts"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 2000}, "top_logprobs"),
        ({"seed": "one"}, "seed"),
        ({"messages": [{"role": "tool", "content": "9"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "9", "name": "x"}]}, "messages[0].name"),
        ({"messages": []}, "messages"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_it_cannot_do_is_refused_by_name(ai, options, param):
    with pytest.raises(openai.BadRequestError) as refused:
        ai.chat.completions.create(**{"messages": CHAT, **DRAW, **options})

    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"echo": True}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": "word " * 5000}, "prompt"),
        ({"logprobs": -1}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stream": True, "max_tokens": 5000}, "max_tokens"),
        ({"model": "tinker://nonsense"}, "model"),
    ],
)
def test_completions_refuse_by_name_too(ai, options, param):
    with pytest.raises(openai.BadRequestError) as refused:
        ai.completions.create(**{"prompt": "a", **DRAW, **options})

    assert refused.value.param.partition("[")[0] == param


def test_a_text_that_no_message_can_carry_is_too_large(ai):
    with pytest.raises(openai.APIStatusError, match="max_payload") as refused:
        ai.completions.create(prompt="word " * (2 << 20), **DRAW)

    assert (refused.value.status_code, refused.value.type) == (413, "invalid_request_error")


@pytest.mark.timeout(300)
def test_a_stream_goes_on_where_a_sampler_died(fragile_server):
    """Another draws the same tokens, and none of them is told twice."""
    options = {**DRAW, "prompt": "a", "max_tokens": 1200, "temperature": 3.0}
    with openai.OpenAI(
        base_url=f"{fragile_server.base_url}/v1", api_key=fragile_server.api_key, max_retries=0
    ) as client:
        with client.completions.create(**options, stream=True) as chunks:
            first = next(iter(chunks)).choices[0]
            fragile_server.kill("sampler")
            rest = [chunk.choices[0] for chunk in chunks]
        whole = client.completions.create(**options).choices[0]

    assert first.finish_reason is None
    assert first.text + "".join(one.text for one in rest) == whole.text


def _answered(server, request):
    """What is stored of a sample; None while it is unknown, or not done."""
    status, answer = server.post("retrieve_future", request)
    return answer if status == 200 and "error" in answer else None


def test_an_unknown_model_and_a_wrong_key_are_told_apart(ai):
    with pytest.raises(openai.NotFoundError, match="tiny/llama") as unknown:
        ai.chat.completions.create(messages=CHAT, model="gpt-4o")
    with pytest.raises(openai.AuthenticationError):
        ai.with_options(api_key="tml-nobody").models.list()

    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
