"""The processes of a soak, and what happens to them at random."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections import Counter
from pathlib import Path

from tests.fault.cluster import PATIENCE_S, READY_PATIENCE_S

ROLES = ("trainer", "sampler", "checkpointer", "gateway", "broker")
KINDS = ("kill", "term", "stop")
WORKERS = 2
LONGEST_STOP_S = 6.0  # longer than a lease, sometimes


class Slot:
    """One service that is to run: its process, and whether that is ready."""

    def __init__(self, cluster, service, **settings):
        self.service = service
        self.is_ending = False  # because it was told to, or killed
        self._killed = False
        self._cluster = cluster
        self._settings = settings
        self.node, self._ready = None, None
        self.begin()

    @property
    def pid(self):
        return self.node.process.pid

    @property
    def is_up(self):
        return self._ready is None and not self.is_ending

    def begin(self):
        self.node, self._ready = self._cluster.begin(self.service, **self._settings)
        self._since, self.is_ending = time.monotonic(), False

    def settle(self):
        """Wait until it is ready."""
        self.node, self._ready = self._cluster.started(self.node, self._ready), None

    def tick(self):
        """Begin it again when it has ended; what is wrong with how it did."""
        code = self.node.process.poll()
        if code is not None:
            wrong = self._wrong(code)
            if self._ready is not None:
                os.close(self._ready)
            self.begin()
            return wrong
        if self._ready is not None and select.select([self._ready], [], [], 0)[0]:
            self.settle()
        late = time.monotonic() - self._since
        if self.is_ending and late > PATIENCE_S:
            self.node.kill()
            return f"{self.service} did not end within {PATIENCE_S:g} s of SIGTERM"
        if self._ready is not None and late > READY_PATIENCE_S:
            self.node.kill()
            return f"{self.service} was not ready after {READY_PATIENCE_S:g} s"
        return ""

    def _wrong(self, code):
        if code == (-signal.SIGKILL if self._killed else 0) and self.is_ending:
            return ""
        return f"{self.service} ended by itself: {code}; see {self.node.log}"

    def end(self, number):
        """Send a signal that ends it."""
        self._killed, self.is_ending, self._since = number == signal.SIGKILL, True, time.monotonic()
        os.kill(self.pid, number)


class Stage:
    """An installation, each process of which may be harmed; ``broken`` says what went wrong."""

    def __init__(self, cluster, rng):
        self.broken = []
        self.done = Counter()
        self._cluster = cluster
        self._rng = rng
        self._asleep = []  # (until, pid)
        services = {"trainer": {"threads": 1}, "sampler": {"threads": 1}, "checkpointer": {}}
        self.slots = {
            "gateway": Slot(cluster, "gateway", workers=WORKERS),
            **{name: Slot(cluster, name, **settings) for name, settings in services.items()},
        }
        for slot in self.slots.values():
            slot.settle()

    def processes(self):
        """Label -> pid of what runs."""
        pids = {name: slot.pid for name, slot in self.slots.items() if slot.is_up}
        pids["gateway parent"] = pids.pop("gateway")
        workers = _children(pids["gateway parent"])
        pids |= {f"gateway {number}": pid for number, pid in enumerate(workers)}
        if self._cluster.broker.is_running:
            pids["broker"] = self._cluster.broker.pid
        return pids

    def tick(self):
        """Wake who has slept enough, begin again who has ended."""
        now = time.monotonic()
        for until, pid in [one for one in self._asleep if one[0] <= now]:
            self._asleep.remove((until, pid))
            _signal(pid, signal.SIGCONT)
        for slot in self.slots.values():
            if wrong := slot.tick():
                self.broken.append(wrong)

    def fault(self, roles, kinds, *, spares_broker=False):
        """Do something to one of those that are up; the broker that is spared does not end."""
        up = [role for role in roles if role == "broker" or self.slots[role].is_up]
        role, kind = self._rng.choice(up), self._rng.choice(kinds)
        if role == "broker" and spares_broker:
            kind = "stop"
        if role == "broker":
            self._harm_broker(kind)
        elif kind == "stop":
            self._send_to_sleep(self._pid(role))
        elif role == "gateway":
            _signal(self._pid(role), _number(kind))  # its parent begins another
        else:
            self.slots[role].end(_number(kind))
        self.done[f"{role} {kind}"] += 1

    def settle(self):
        """Everybody awake and ready again."""
        for _, pid in self._asleep:
            _signal(pid, signal.SIGCONT)
        self._asleep.clear()
        deadline = time.monotonic() + READY_PATIENCE_S
        while not all(slot.is_up for slot in self.slots.values()):
            self.tick()
            if time.monotonic() > deadline:
                self.broken.append("not everything came back")
                return
            time.sleep(0.1)

    def end(self):
        """Tell all services to end."""
        for slot in self.slots.values():
            slot.end(signal.SIGTERM)
        for name, slot in self.slots.items():
            code = slot.node.process.wait(PATIENCE_S)
            if code:
                self.broken.append(f"{name} ended with code {code}")

    def _pid(self, role):
        pid = self.slots[role].pid
        return self._rng.choice(_children(pid) or [pid]) if role == "gateway" else pid

    def _send_to_sleep(self, pid):
        _signal(pid, signal.SIGSTOP)
        self._asleep.append((time.monotonic() + self._rng.uniform(1.0, LONGEST_STOP_S), pid))

    def _harm_broker(self, kind):
        broker = self._cluster.broker
        if kind == "stop":
            self._send_to_sleep(broker.pid)
            return
        _signal(broker.pid, signal.SIGCONT)
        if kind == "kill":
            broker.kill()
        else:
            broker.stop()
        broker.restart()


def _number(kind):
    return signal.SIGKILL if kind == "kill" else signal.SIGTERM


def _signal(pid, number):
    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
        os.kill(pid, number)


def _children(pid):
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
