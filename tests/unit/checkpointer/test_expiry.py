"""When checkpoints, samplers and sessions end."""

from __future__ import annotations

import pytest

from tinsmith.errors import Gone
from tinsmith.messages.base import BlobRef
from tinsmith.messages.checkpoints import Checkpoint
from tinsmith.messages.ops import LoraShape
from tinsmith.messages.registry import Sampler, Session
from tinsmith.messages.sampling import AdapterRef
from tinsmith_checkpointer.expiry import NS, check_alive, is_expired, is_left_over, is_over

REF = BlobRef("0" * 64, 1)
DAY_NS = 86400 * NS


def checkpoint(expires_ns):
    return Checkpoint(
        path="tinker://x/weights/a",
        model_id="x",
        kind="weights",
        name="a",
        op_seq=1,
        base_model="m",
        lora=LoraShape(),
        step=1,
        parts={"f": REF},
        size_bytes=1,
        created_ns=0,
        expires_ns=expires_ns,
    )


def session(status="finished", ended_ns=DAY_NS):
    return Session(session_id="s", owner="o", created_ns=0, status=status, ended_ns=ended_ns)


def sampler(*, path=None, adapter=True):
    files = AdapterRef(version="v", files={"f": REF}) if adapter else None
    common = {"session_id": "s", "owner": "o", "created_ns": 0, "base_model": "m"}
    return Sampler(sampler_id="s:sample:0", model_path=path, adapter=files, **common)


@pytest.mark.parametrize(
    ("expires_ns", "since_s", "expected"),
    [
        (None, 0, False),
        (5 * NS, 0, True),
        (6 * NS, 0, False),
        (4 * NS, 1, True),
        (5 * NS, 1, False),
    ],
)
def test_a_checkpoint_expires_at_its_time(expires_ns, since_s, expected):
    assert is_expired(checkpoint(expires_ns), now_ns=5 * NS, since_s=since_s) is expected


def test_who_asks_for_an_expired_checkpoint_is_told_since_when():
    with pytest.raises(Gone, match="expired 7 s ago"):
        check_alive(checkpoint(3 * NS), now_ns=10 * NS)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [(session(), True), (session("active", None), False), (session(ended_ns=2 * DAY_NS), False)],
)
def test_a_session_is_over_some_time_after_its_end(entry, expected):
    assert is_over(entry, now_ns=2 * DAY_NS, since_s=86400) is expected


@pytest.mark.parametrize(
    ("entry", "of", "expected"),
    [
        (sampler(), session(), True),
        (sampler(), session("active", None), False),
        (sampler(path="tinker://x"), session(), False),  # its weights are a checkpoint's
        (sampler(adapter=False), session(), False),
        (sampler(path="tinker://x"), None, True),
    ],
)
def test_a_sampler_with_weights_of_its_own_ends_with_its_session(entry, of, expected):
    assert is_left_over(entry, of, now_ns=2 * DAY_NS) is expected
