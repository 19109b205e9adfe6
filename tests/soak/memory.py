"""What processes hold in memory, from the time that each is warm to its end.

The broker keeps an index of the subjects that its streams have a message of, and the log has a
subject for each record. So what it holds grows with what it stores, by design, and is judged
without that index.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
import urllib.request
from pathlib import Path

EVERY_S = 1.0
SAMPLES = 9  # that a figure is the median of: memory goes up and down with each request
ALLOWED = 0.05
MIB = 1 << 20
INDEX_BYTES = 220
"""Of a stored message, measured: nats-server 2.15 after 200,000 messages of as many subjects,
less what it held after as many of 50 subjects."""


def rss_bytes(pid):
    """What process ``pid`` holds; None when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS")]
    return found[0] if found else None  # none of one that nobody has waited for yet


def index_bytes(broker):
    """What the index of what ``broker`` stores takes; None while it does not answer."""
    try:
        with urllib.request.urlopen(f"{broker.monitoring_url}/jsz", timeout=5) as answer:
            return INDEX_BYTES * json.load(answer)["messages"]
    except (OSError, ValueError):
        return None


class Life:
    """One process from its start to its end."""

    def __init__(self, label, pid):
        self.label = label
        self.pid = pid
        self.samples = []  # (seconds, bytes)

    def judged(self, warm_s):
        """Its figures as a row, if it has lived long enough to be called flat or not."""
        began, ended = self.samples[0][0], self.samples[-1][0]
        warm = [size for at, size in self.samples if at >= began + warm_s]
        row = {"process": self.label, "pid": self.pid, "life_s": round(ended - began, 1)}
        if len(warm) < 3 * SAMPLES:
            return row | {"growth": None}
        first, last = statistics.median(warm[:SAMPLES]), statistics.median(warm[-SAMPLES:])
        sizes = {"warm_mib": round(first / MIB, 1), "end_mib": round(last / MIB, 1)}
        return row | sizes | {"growth": round(last / first - 1, 4)}


class Watch:
    """Looks at processes again and again; use as a context manager."""

    def __init__(self, processes, broker):
        """``processes()`` are those that run now, label -> pid; that of ``broker`` is "broker"."""
        self._processes = processes
        self._broker = broker
        self._lives = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="memory")

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def rows(self, warm_s):
        """Of every process that has lived; those whose ``growth`` is None died too early."""
        return [life.judged(warm_s) for life in self._lives.values()]

    def _look(self):
        while not self._over.wait(EVERY_S):
            for label, pid in self._processes().items():
                size = rss_bytes(pid)
                index = index_bytes(self._broker) if label == "broker" else 0
                if size is not None and index is not None:
                    life = self._lives.setdefault(pid, Life(label, pid))
                    life.samples.append((time.monotonic(), size - index))


def broken(rows):
    """Which of them have grown by more than is allowed."""
    return [
        f"{row['process']} ({row['pid']}) grew by {row['growth']:.1%} in {row['life_s']:.0f} s"
        for row in rows
        if row["growth"] is not None and row["growth"] > ALLOWED
    ]
