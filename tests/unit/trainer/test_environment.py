"""What a log says of the machine that wrote it."""

from __future__ import annotations

import pytest

from tinsmith.messages.base import decoder, encode
from tinsmith.testing import tiny_model
from tinsmith_trainer import base_model, environment


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folders = [tiny_model.build(tmp_path_factory.mktemp("m"), seed=seed) for seed in (0, 0, 1)]
    return [base_model.load(str(folder), name="tiny/llama") for folder in folders]


def test_it_can_be_written_to_the_log_and_read_back(bases):
    found = environment.describe(bases[0], microbatch_tokens=7)

    assert decoder(dict[str, str]).decode(encode(found)) == found
    assert found["base_model"] == "tiny/llama"
    assert found["microbatch_tokens"] == "7"


def test_equal_weights_have_equal_digests_and_others_do_not(bases):
    first, same, other = map(environment.base_blake3, bases)

    assert first == same != other
