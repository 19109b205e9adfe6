"""What processes hold in memory, from the time that each is warm to its end.

The broker keeps an index of the subjects that its streams have a message of, and the log has a
subject for each record. So what it holds grows with what it stores, by design; and it has blocks
of the streams in memory, see ``tests.soak.heap``. It is judged by what its heap has besides.
"""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path

from tests.soak.heap import index_bytes

from tinsmith.bus.streams import DEDUP_WINDOW_S

EVERY_S = 1.0
SAMPLES = 9  # that a figure is the median of: memory goes up and down with each request
ALLOWED = 0.05
MIB = 1 << 20
BROKER = "broker"
REST_BYTES = 16 * MIB  # of blocks, when nobody reads: those that are being written
REST_PATIENCE_S = 90.0  # a block that nobody reads is forgotten after seconds


def rss_bytes(pid):
    """What process ``pid`` holds; None when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS")]
    return found[0] if found else None  # none of one that nobody has waited for yet


class Life:
    """One process from its start to its end."""

    def __init__(self, label, pid):
        self.label = label
        self.pid = pid
        self.samples = []  # (seconds, bytes of the process, bytes that must not grow)

    def judged(self, warm_s):
        """Its figures as a row, if it has lived long enough to be called flat or not.

        ``growth`` is that of what must not grow, as a part of the whole.
        """
        if self.label == BROKER:  # which remembers as long what was sent to a queue
            warm_s = max(warm_s, 1.25 * DEDUP_WINDOW_S)
        began, ended = self.samples[0][0], self.samples[-1][0]
        warm = [(size, kept) for at, size, kept in self.samples if at >= began + warm_s]
        row = {"process": self.label, "pid": self.pid, "life_s": round(ended - began, 1)}
        if len(warm) < 3 * SAMPLES:
            return row | {"growth": None}
        (first, kept), (last, kept_last) = (_median(warm[:SAMPLES]), _median(warm[-SAMPLES:]))
        sizes = {"warm_mib": round(first / MIB, 1), "end_mib": round(last / MIB, 1)}
        return row | sizes | {"growth": round((kept_last - kept) / first, 4)}


def _median(samples):
    return [statistics.median(column) for column in zip(*samples, strict=True)]


class Watch:
    """Looks at processes again and again; use as a context manager.

    Leaving it raises what went wrong meanwhile: a figure that is missing is no figure that held.
    """

    def __init__(self, processes, broker, profiled):
        """``processes()`` are those that run now, label -> pid; "broker" is ``broker``."""
        self._processes = processes
        self._broker = broker
        self._profiled = profiled
        self._lives = {}
        self._failure = None  # of the thread, which would end unseen
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="memory")

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def rows(self, warm_s):
        """Of every process that has lived; those whose ``growth`` is None died too early."""
        return [life.judged(warm_s) for life in self._lives.values()]

    def _look(self):
        try:
            self._look_until_over()
        except BaseException as failure:  # noqa: BLE001  whatever it is, it is raised at the end
            self._failure = failure

    def _look_until_over(self):
        while not self._over.wait(EVERY_S):
            for label, pid in self._processes().items():
                size = rss_bytes(pid)
                kept = self._kept() if label == BROKER else size
                if size is not None and kept is not None:
                    life = self._lives.setdefault(pid, Life(label, pid))
                    life.samples.append((time.monotonic(), size, kept))

    def _kept(self):
        heap, index = self._profiled.heap(), index_bytes(self._broker)
        return None if heap is None or index is None else heap.live - heap.buffers - index


def broken(rows):
    """Which of them have grown by more than is allowed, and whether the broker was judged."""
    grown = [
        f"{row['process']} ({row['pid']}) grew by {row['growth']:.1%} in {row['life_s']:.0f} s"
        for row in rows
        if row["growth"] is not None and row["growth"] > ALLOWED
    ]
    if all(row["growth"] is None for row in rows if row["process"] == BROKER):
        grown.append("no life of the broker was long enough to be judged; give it more minutes")
    return grown


def unrest(profiled):
    """What is wrong when the broker does not forget its blocks once nobody reads them."""
    deadline = time.monotonic() + REST_PATIENCE_S
    held = None
    while time.monotonic() < deadline:
        heap = profiled.heap()
        held = heap and heap.buffers
        if held is not None and held <= REST_BYTES:
            return []
        time.sleep(EVERY_S)
    return [f"the broker holds {held} bytes of blocks that nobody reads; at most {REST_BYTES}"]
