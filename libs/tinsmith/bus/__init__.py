"""Everything Tinsmith does with NATS; nothing else imports it."""

from __future__ import annotations

from tinsmith.bus.connection import Bus
from tinsmith.bus.log import CommitLog, Encoded, LogWriter
from tinsmith.bus.pull import Delivery, Worklist
from tinsmith.bus.results import ResultStore
from tinsmith.bus.subscription import Subscription
from tinsmith.bus.table import Table

__all__ = [
    "Bus",
    "CommitLog",
    "Delivery",
    "Encoded",
    "LogWriter",
    "ResultStore",
    "Subscription",
    "Table",
    "Worklist",
]
