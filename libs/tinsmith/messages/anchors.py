"""Anchors: where logs ended at some moment, kept apart from the logs themselves.

Produced by the checkpointer, read by whoever audits. A log that is shorter than an anchor says,
or has another entry at an anchored place, was changed after it was written.
"""

from __future__ import annotations

import msgspec

from tinsmith.messages.base import Message


class Head(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The last entry that a model's log had."""

    model_id: str
    place: str  # the end of the entry's subject: op.<seq>, own.<epoch> or state.<seq>
    stream_seq: int  # in the log stream
    blake3: str  # of the entry's bytes


class PrunedLog(Message, frozen=True, kw_only=True):
    """What is left of a log that was taken off the broker by policy; written before it is taken.

    The registry has it for whoever looks for the run, and an anchor as evidence.
    """

    model_id: str
    pruned_ns: int  # unix time, by the clock of who did it
    reason: str  # the policy
    by: str  # the instance that did it
    head: Head  # its last entry, which fixes all before it
    entries: int
    samples: int = 0  # records of the log of samples that went with it
    is_removed: bool = False  # in the registry, once nothing of it is on the broker any more


class Anchor(Message, frozen=True, kw_only=True):
    """The heads of all logs that grew between two places of the log stream."""

    number: int  # from 1, without gaps
    time_ns: int  # unix time, by the clock of who wrote it
    after: int = 0  # stream sequence where the anchor before this one ended
    through: int  # stream sequence of the last entry that it covers
    heads: tuple[Head, ...]  # of that stretch, by model id
    prev_blake3: str  # of the previous anchor's bytes; 64 zeros for the first
    pruned: tuple[PrunedLog, ...] = ()  # logs that are taken away, whole, from now on


class Anchored(msgspec.Struct, frozen=True, kw_only=True):
    """One run's part of an anchor, as exported logs carry it."""

    number: int
    time_ns: int
    anchor_blake3: str  # of the whole anchor's bytes
    head: Head
