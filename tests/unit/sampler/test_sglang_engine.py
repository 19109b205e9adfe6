"""What the SGLang engine decides without a server: settings, ends of rows, stretches of scores."""

from __future__ import annotations

import base64
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from tests.unit.sampler.examples import prompt, row, scoring
from transformers import AutoConfig

from tinsmith.config import ModelConfig
from tinsmith.errors import ConfigError, ServerError
from tinsmith.testing import tiny_model
from tinsmith_sampler.config import SamplerConfig
from tinsmith_sampler.engine import Targets
from tinsmith_sampler.model import ServedModel, TorchOptions
from tinsmith_sampler.sglang import base_model, continuing
from tinsmith_sampler.sglang.assembly import sglang_engine
from tinsmith_sampler.sglang.continuing import Continuation
from tinsmith_sampler.sglang.failures import SglangAborted
from tinsmith_sampler.sglang.logprobs import NotFinite
from tinsmith_sampler.sglang.scoring import Score
from tinsmith_sampler.sglang.watching import parsed
from tinsmith_sampler.sglang.wire import Answer, FinishReason, Meta

LENGTH = FinishReason(type="length")


@pytest.fixture(scope="module")
def tiny(models):
    return base_model.read(str(models["llama"]))


def answer(*tokens, reason=None, logprob=-1.0):
    items = [(logprob, token, None) for token in tokens]
    meta = Meta(id="r", finish_reason=reason, output_token_logprobs=items)
    return Answer(output_ids=list(tokens), meta_info=meta)


def drawn(model, *answers, **fields):
    growing = Continuation(row(**fields), model)
    for one in answers:
        growing.take(one)
    return growing.result()


@pytest.mark.parametrize("family", tiny_model.FAMILIES)
def test_a_folder_tells_what_its_loaded_model_would(family, tmp_path):
    told = base_model.read(str(tiny_model.build(tmp_path, family=family)))
    loaded = ServedModel(TorchOptions(model_path=str(tmp_path), kv_tokens=8192))

    assert told.vocab_size == loaded.vocab_size
    assert told.context_length == loaded.context_length
    assert told.eos_tokens == loaded.eos_tokens
    linear = {name: shape for name, shape in loaded.layer_shapes.items() if not shape.experts}
    assert told.layers == linear


def test_a_row_ends_at_the_first_end_however_the_server_went_on(tiny):
    made = drawn(tiny, answer(9, 8, 7, 6, reason=LENGTH), max_tokens=4, stop_tokens=(8,))

    assert made.tokens.tolist() == [9, 8]
    assert made.logprobs.tolist() == [-1.0, -1.0]
    assert made.stop_reason == "stop"


def test_a_row_that_the_server_cut_short_is_no_result(tiny):
    with pytest.raises(ServerError, match="drew 2 tokens where 4 were asked for"):
        drawn(tiny, answer(9, 8, reason=LENGTH), max_tokens=4)


def test_a_row_that_was_given_up_is_no_result(tiny):
    with pytest.raises(SglangAborted):
        drawn(tiny, answer(9, reason=FinishReason(type="abort")), max_tokens=4)
    with pytest.raises(ServerError, match="in the middle"):
        drawn(tiny, answer(9), max_tokens=4)


@pytest.mark.parametrize("logprob", [None, float("-inf")])
def test_what_is_not_finite_is_no_result(tiny, logprob):
    with pytest.raises(NotFinite):
        drawn(tiny, answer(9, reason=LENGTH, logprob=logprob), max_tokens=1)


def test_tokens_that_could_not_be_drawn_are_no_result(tiny):
    nan = FinishReason(type="stop", matched="NaN happened")
    with pytest.raises(NotFinite):
        drawn(tiny, answer(9, reason=nan), max_tokens=4)


def test_every_seed_is_sent_and_an_ignored_end_has_no_stop_tokens(tiny):
    asked = continuing.body(row(seed=0, stop_tokens=(8,)), tiny, None).sampling_params
    ended = continuing.body(row(ignore_eos=False, stop_tokens=(8,)), tiny, None).sampling_params

    assert (asked.sampling_seed, asked.ignore_eos, asked.stop_token_ids) == (0, True, ())
    assert (ended.ignore_eos, ended.stop_token_ids) == (False, (2, 8))


def test_where_tokens_were_sent_comes_with_the_servers_end_of_a_row(tmp_path):
    """Which may be behind that of ours."""
    model = base_model.read(str(tiny_model.build(tmp_path, family="qwen3_moe")))
    config = AutoConfig.from_pretrained(tmp_path)
    k, layers = config.num_experts_per_tok, config.num_hidden_layers
    asked = replace(row(prompt=prompt(3), max_tokens=4, stop_tokens=(8,)), routed_experts=True)
    assert continuing.body(asked, model, None).return_routed_experts
    growing = Continuation(asked, model)
    growing.take(answer(9, 8))
    assert growing.is_ended
    sent = np.arange(6 * layers * k, dtype="<i4").reshape(6, layers, k) % config.num_experts
    last = answer(7, 6, reason=LENGTH)
    told = base64.b64encode(sent.tobytes()).decode()
    growing.take(msgspec.structs.replace(last, meta_info=replaced(last.meta_info, told)))

    made = growing.result()
    assert made.tokens.tolist() == [9, 8]
    np.testing.assert_array_equal(made.experts, sent[:4])


@pytest.mark.parametrize("is_ended_by_us", [True, False])
def test_a_row_that_lacks_where_its_tokens_were_sent_is_no_result(tiny, is_ended_by_us):
    """A server that gives a row up behind our end of it tells nothing; nor may another."""
    stops = {"stop_tokens": (8,)} if is_ended_by_us else {}
    asked = replace(row(max_tokens=2, **stops), routed_experts=True)
    growing = Continuation(asked, tiny)
    growing.take(answer(9, 8, reason=LENGTH))
    assert growing.is_ended
    with pytest.raises(ServerError, match="without telling where its tokens went"):
        growing.result()

    with pytest.raises(SglangAborted):
        growing.take(answer(reason=FinishReason(type="abort")))
    without = Continuation(row(max_tokens=2, **stops), tiny)
    without.take(answer(9, 8))
    without.take(answer(reason=FinishReason(type="abort")))
    assert without.result().tokens.tolist() == [9, 8]


def replaced(meta, told):
    return msgspec.structs.replace(meta, routed_experts=told)


def test_stretches_hold_every_target_and_stay_small(monkeypatch):
    monkeypatch.setattr("tinsmith_sampler.sglang.scoring._MOST", 64)
    positions = np.repeat(np.arange(1, 100), 2)
    tokens = np.random.default_rng(0).integers(0, 448, len(positions))
    parts = Score(scoring(prompt(100), last_n=0, targets=Targets(positions, tokens))).parts()

    for position, token in zip(positions, tokens, strict=True):
        (part,) = [one for one in parts if one.first <= position < one.end]
        assert token in part.targets
    assert max((part.end - part.first) * len(part.targets) for part in parts) <= 64


def test_what_cannot_be_served_is_refused_at_the_start(tmp_path, models):
    path = str(models["llama"])

    def refusal(model, **settings):
        config = SamplerConfig(engine="sglang", **settings)
        told_of = ModelConfig(**{"name": "m", "path": path, **model})
        with pytest.raises(ConfigError) as told:
            sglang_engine(told_of, config, tmp_path, {})
        return str(told.value)

    url = {"sglang_url": "http://there"}
    assert "which takes servers that are started here" in refusal({"full": True}, **url)
    other = str(tiny_model.build(tmp_path / "other", family="gemma2"))
    assert "not of gemma2" in refusal({"full": True, "path": other})
    assert "quantization = 'int8'" in refusal({"quantization": "int8"})
    both = {"sglang_url": "http://there", "sglang_python": "python"}
    assert "sampler.sglang_url: with it no server is started" in refusal({}, **both)


def test_metrics_become_figures():
    text = (
        '# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs{rank="0"} 3.0\n'
        'sglang:num_running_reqs{rank="1"} 2.0\nsglang:gen_throughput{a="b c"} 7.5\nother 1\n'
    )

    assert parsed(text) == {"sglang_running": 5.0, "sglang_tokens_per_s": 7.5}
