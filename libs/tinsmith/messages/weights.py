"""Weight lineages: states of one model's or adapter's weights, each proven by a root.

Produced by whoever trains, read by whoever samples. The bytes lie in chunks, named by their
digests, in a stream of their own; these entries are the chain that says what the chunks are.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tinsmith.messages.base import BlobRef, Message

Form = Literal["full", "delta", "skip"]
ReplicaState = Literal["cold", "staging", "active", "fenced"]


class PublishedVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a lineage, by the root of its bits."""

    lineage_id: str
    version: int
    root: str


class LineageOpened(Message, frozen=True, kw_only=True):
    """A publisher took the lineage: from here on every earlier one's append fails."""

    lineage_id: str
    epoch: int  # from 1; rises with every take-over
    publisher_id: str
    content: Literal["full", "adapter"]
    about: dict[str, str] = {}  # of an adapter: base model, rank, scale; never needed to read it
    prev_blake3: str  # of the previous entry's bytes; 64 zeros for the first


class WeightsStored(Message, frozen=True, kw_only=True):
    """A state, or a way to it, whose chunks are all there.

    ``full`` holds all of it; ``delta`` leads to it from the version before; ``skip`` from one
    further back. An entry whose version is the lineage's next one is the COMMIT of that version,
    and only ``full`` and ``delta`` can be; the others are other ways to a version that is there.
    """

    lineage_id: str
    epoch: int
    version: int  # from 1
    form: Form
    root: str  # of the canonical plane, bfloat16 in the checkpoint's order
    base_version: int = 0  # 0: a full state needs none
    base_root: str = ""
    manifest: tuple[BlobRef, ...]  # the parts of the table that says what the chunks hold
    size: int  # bytes of all chunks, the manifest's too
    first_chunk: int  # no chunk of it has a lower sequence in the stream of chunks
    commit_seq: int = 0  # stream sequence of its version's COMMIT; 0: this is it
    changed: int = 0  # elements
    elements: int = 0  # of the whole state
    step: int = 0  # the trainer's, for people
    time_ns: int = 0  # unix time, by the clock of who wrote it
    plane_roots: dict[str, str] = {}  # by plane id, of planes that the publisher derived as well
    prev_blake3: str


LineageEntry = LineageOpened | WeightsStored


class LineageHead(Message, frozen=True, kw_only=True):
    """The newest version of a lineage, set by compare-and-set after its COMMIT.

    It may lag behind the chain, which is the truth, and is never ahead of it.
    """

    lineage_id: str
    epoch: int
    version: int
    root: str
    full_version: int  # the newest that is there as a whole
    stream_seq: int  # of the COMMIT


class WeightsStatus(Message, frozen=True, kw_only=True):
    """What one replica serves of a lineage; sent at every change, and every few seconds."""

    lineage_id: str
    replica: str
    plane: str
    state: ReplicaState
    epoch: int = 0
    version: int = 0  # that it serves; 0: none
    root: str = ""
    plane_root: str = ""
    behind: int = 0  # versions that are committed and not served
    wants_full: bool = False  # it cannot catch up with what is kept
    reason: str = ""  # why it is fenced
    received_bytes: int = 0  # of chunks, since it started
    mismatches: int = 0  # of bits that were not those a root names, since it started
    stage_ms: float = 0.0  # of the last version: fetched, read and proven beside the service
    pause_ms: float = 0.0  # of the last version: nothing was computed for so long
    lag_ms: float = 0.0  # from its entry's time to being served; by two clocks
