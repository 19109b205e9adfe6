"""Reading runs' logs, wherever they lie: on a broker, or in an exported file."""

from tinsmith.logbook.contents import op_of, result_of
from tinsmith.logbook.entry import DigestMismatch, Entry, LogDamaged
from tinsmith.logbook.source import Logbook, open_logbook, resolve_run

__all__ = [
    "DigestMismatch",
    "Entry",
    "LogDamaged",
    "Logbook",
    "op_of",
    "open_logbook",
    "resolve_run",
    "result_of",
]
