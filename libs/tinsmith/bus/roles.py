"""What each service may do on the bus: the rows of the table that it says, hears, reads, writes.

``permissions`` makes the broker's rules of it. A service that is taught something new fails under
these rules until its role says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tinsmith.messages import table
from tinsmith.messages.table import Entity, Event, Queue, Row, Rpc

Kept = tuple[str, Row]
"""A stream that is read and appended to, and the subjects of its entries."""

LOG: Kept = (table.LOG_STREAM, table.LOG_TEMPLATE)
ANCHORS: Kept = (table.ANCHOR_STREAM, table.ANCHOR_TEMPLATE)
RESULTS: Kept = (table.RESULT_STREAM, table.RESULT_TEMPLATE)
SAMPLE_LOG: Kept = (table.SAMPLE_LOG_STREAM, table.SAMPLE_LOG_TEMPLATE)
LINEAGES: Kept = (table.LINEAGE_STREAM, table.LINEAGE_TEMPLATE)
CHUNKS: Kept = (table.CHUNK_STREAM, table.CHUNK_TEMPLATE)
AUDIT: Kept = (table.AUDIT_STREAM, table.AUDIT_TEMPLATE)


@dataclass(frozen=True, kw_only=True)
class Role:
    """One service's part; what every service does is not repeated here."""

    calls: tuple[Rpc[Any, Any], ...] = ()
    serves: tuple[Rpc[Any, Any], ...] = ()
    emits: tuple[Event[Any], ...] = ()
    hears: tuple[Event[Any], ...] = ()
    enqueues: tuple[Queue[Any], ...] = ()
    works: tuple[Queue[Any], ...] = ()
    """Takes messages from them, by a consumer of its own making."""
    supersedes: tuple[Queue[Any], ...] = ()
    """Deletes consumers of theirs: those of owners that are gone."""
    looks: tuple[Queue[Any], ...] = ()
    """Reads what waits on them."""
    withdraws: tuple[Queue[Any], ...] = ()
    """Takes messages off them without working on them."""
    reads: tuple[Kept, ...] = ()
    appends: tuple[Kept, ...] = ()
    forgets: tuple[Kept, ...] = ()
    """Purges of them what is no longer needed."""
    sees: tuple[Entity[Any], ...] = ()
    """Tables it reads and watches."""
    sets: tuple[Entity[Any], ...] = ()
    """Tables it writes to."""
    erases: bool = False
    """Overwrites entries of tables on the broker's disk."""


EVERYBODY = Role(
    emits=(table.SERVICE_ALIVE,),
    sees=(table.MASTER_KEYS, table.RUN_KEYS, table.FORGOTTEN_RUNS),
)

ROLES: dict[str, Role] = {
    "gateway": Role(
        calls=(
            table.CHANGE_CHECKPOINT,
            table.DELETE_CHECKPOINT,
            table.COPY_CHECKPOINT,
            table.TOKENIZE_TEXT,
            table.RENDER_CHAT,
            table.SPELL_TOKENS,
        ),
        emits=(
            table.REQUEST_TAKEN,
            table.SESSION_ALIVE,
            table.SAMPLE_CANCELLED,
            table.SAMPLE_READY,
        ),
        hears=(
            table.OP_DONE,
            table.SAMPLE_READY,
            table.REQUEST_TAKEN,
            table.TOKENS_DRAWN,
            table.SERVICE_ALIVE,
            table.SESSION_ALIVE,
            table.WEIGHTS_STATUS,
        ),
        enqueues=(table.OPS, table.PLACEMENTS, table.SAMPLES, table.HELD),
        looks=(table.OPS, table.PLACEMENTS, table.SAMPLES, table.HELD),
        withdraws=(table.SAMPLES, table.HELD),
        reads=(LOG, RESULTS, AUDIT, LINEAGES),
        appends=(RESULTS, AUDIT),  # the result of a request that was cancelled
        sees=(
            table.SESSIONS,
            table.RUNS,
            table.SAMPLERS,
            table.CHECKPOINTS,
            table.SERVED,
            table.USAGE,
            table.SECRETS,
            table.API_KEYS,
            table.LINEAGES,
        ),
        sets=(
            table.SESSIONS,
            table.RUNS,
            table.SAMPLERS,
            table.SECRETS,
            table.API_KEYS,  # a key that ends itself
            table.RUN_KEYS,
        ),
    ),
    "trainer": Role(
        calls=(table.COMMIT_CHECKPOINT, table.GET_CHECKPOINT),
        emits=(table.OP_DONE,),
        hears=(table.WEIGHTS_STATUS, table.SAMPLE_PICKED),
        works=(table.OPS, table.PLACEMENTS),
        supersedes=(table.OPS,),
        looks=(table.OPS,),
        withdraws=(table.OPS,),
        reads=(LOG, LINEAGES, CHUNKS),
        appends=(LOG, LINEAGES, CHUNKS),
        forgets=(CHUNKS,),
        sees=(table.SESSIONS, table.RUNS, table.LINEAGES),
        sets=(table.SERVED, table.LINEAGES),
    ),
    "sampler": Role(
        serves=(table.TOKENIZE_TEXT, table.RENDER_CHAT, table.SPELL_TOKENS),
        emits=(
            table.SAMPLE_READY,
            table.TOKENS_DRAWN,
            table.WEIGHTS_STATUS,
            table.SAMPLE_PICKED,
        ),
        hears=(table.SAMPLE_CANCELLED, table.SERVICE_ALIVE),
        works=(table.SAMPLES,),
        reads=(RESULTS, LINEAGES, CHUNKS),
        appends=(RESULTS, SAMPLE_LOG),
        sees=(table.LINEAGES, table.SERVED),
        sets=(table.SERVED,),
    ),
    "checkpointer": Role(
        serves=(
            table.COMMIT_CHECKPOINT,
            table.GET_CHECKPOINT,
            table.CHANGE_CHECKPOINT,
            table.DELETE_CHECKPOINT,
            table.COPY_CHECKPOINT,
        ),
        reads=(LOG, ANCHORS, RESULTS, SAMPLE_LOG),
        appends=(ANCHORS,),
        forgets=(LOG, SAMPLE_LOG, LINEAGES, CHUNKS),
        looks=(table.OPS, table.PLACEMENTS, table.SAMPLES, table.HELD),
        sees=(
            table.SESSIONS,
            table.RUNS,
            table.SAMPLERS,
            table.CHECKPOINTS,
            table.USAGE,
            table.METER,
            table.DISCARDED,
            table.LINEAGES,
            table.PRUNED,
        ),
        sets=(
            table.SESSIONS,
            table.SAMPLERS,
            table.CHECKPOINTS,
            table.USAGE,
            table.METER,
            table.DISCARDED,
            table.RUN_KEYS,
            table.FORGOTTEN_RUNS,
            table.LINEAGES,  # of runs that are over
            table.PRUNED,
        ),
        erases=True,
    ),
}
