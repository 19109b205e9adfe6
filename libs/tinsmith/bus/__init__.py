"""Everything Tinsmith does with NATS; nothing else imports it."""

from __future__ import annotations

from tinsmith.bus.anchors import Anchors
from tinsmith.bus.connection import Bus
from tinsmith.bus.log import CommitLog, Committed, Encoded, LogWriter
from tinsmith.bus.pull import BLOB_TRIES, Delivery, Taken, Unreadable, Worklist
from tinsmith.bus.results import ResultStore
from tinsmith.bus.samples import SampleLog
from tinsmith.bus.shared import HIGHEST, LOWEST, SharedWork, Wish
from tinsmith.bus.subscription import Subscription
from tinsmith.bus.table import Table

__all__ = [
    "BLOB_TRIES",
    "HIGHEST",
    "LOWEST",
    "Anchors",
    "Bus",
    "CommitLog",
    "Committed",
    "Delivery",
    "Encoded",
    "LogWriter",
    "ResultStore",
    "SampleLog",
    "SharedWork",
    "Subscription",
    "Table",
    "Taken",
    "Unreadable",
    "Wish",
    "Worklist",
]
