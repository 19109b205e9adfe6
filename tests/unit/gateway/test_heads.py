"""Heads of the log in metrics survive the client: exact, and chunk by chunk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker.lib.chunked_fwdbwd_helpers import combine_fwd_bwd_output_results
from tinker.proto import response_conv
from tinker.proto import tinker_public_pb2 as pb
from tinker.types import OptimStepResponse

from tinsmith.messages import ops
from tinsmith_gateway.wire.heads import head_metrics
from tinsmith_gateway.wire.results import op_payload

DIGESTS = st.binary(min_size=32, max_size=32).map(bytes.hex)
SCORED = ops.ForwardBackwardDone(logprobs=(), metrics={"loss:sum": 1.0})


def head_of(metrics, chunk=0):
    """As docs/audit.md has it for users."""
    end = f":unique_{chunk}" if chunk else ":unique"
    a, b = (int(metrics[f"log_head_{half}{end}"]) for half in "ab")
    return int(metrics[f"log_seq{end}"]), f"{a:012x}{b:012x}"


def read(seq, digest, result=SCORED):
    payload = op_payload(result, model_id="m", head=head_metrics(seq, digest))
    return payload.body


@given(st.integers(1, 2**31 - 1), DIGESTS)
def test_a_step_says_where_the_log_was_after_it(seq, digest):
    done = ops.OptimStepDone(metrics={"grad_norm": 2.0})
    answer = OptimStepResponse.model_validate_json(read(seq, digest, done))

    assert head_of(answer.metrics) == (seq, digest[:24])
    assert answer.metrics["grad_norm"] == 2.0


@given(st.lists(DIGESTS, min_size=1, max_size=5))
def test_each_chunk_of_a_call_keeps_its_own_head(digests):
    bodies = [read(seq, digest) for seq, digest in enumerate(digests, start=7)]
    chunks = [response_conv.deserialize_forward_backward_output(body) for body in bodies]
    metrics = combine_fwd_bwd_output_results(chunks).metrics

    found = [head_of(metrics, chunk) for chunk in range(len(digests))]
    assert found == [(seq, digest[:24]) for seq, digest in enumerate(digests, start=7)]
    assert metrics["loss:sum"] == len(digests)


def test_what_is_stored_is_not_changed():
    read(1, "f" * 64)

    assert SCORED.metrics == {"loss:sum": 1.0}
    assert "log_seq:unique" in pb.ForwardBackwardOutput.FromString(read(1, "f" * 64)).metrics


@pytest.mark.parametrize("result", [ops.SaveWeightsDone(path="p"), ops.LoadWeightsDone(path="p")])
def test_an_answer_without_metrics_gets_none(result):
    assert read(1, "f" * 64, result) == op_payload(result, model_id="m").body
