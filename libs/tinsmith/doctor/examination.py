"""All checks, side by side: none can hang the others, and none can break the report."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from tinsmith.doctor import broker, graphics, machine, models, network, storage
from tinsmith.doctor.finding import Finding, fail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tinsmith.doctor.finding import Subject

    Check = Callable[[Subject], Finding | list[Finding] | None]

PATIENCE_S = 40.0
"""For all checks together."""

CHECKS: Mapping[str, Check] = {
    "python": machine.python,
    "packages": machine.packages,
    "cores": machine.cores,
    "memory": machine.main_memory,
    "gpu": graphics.gpu,
    "disk": machine.disk,
    "blob store": storage.blob_store,
    "master key": storage.master_key,
    "ports": network.ports,
    "nats-server": broker.server_program,
    "broker": broker.answering,
    "models": models.models,
    "sglang": models.sglang,
}
"""In the order of the report."""


def examine(
    subject: Subject,
    checks: Mapping[str, Check] = CHECKS,
    *,
    patience_s: float = PATIENCE_S,
) -> Iterator[Finding]:
    """What each check finds, in order, as soon as it is known."""
    deadline = time.monotonic() + patience_s
    running = [_Running(name, check, subject) for name, check in checks.items()]
    for one in running:
        one.join(max(0.0, deadline - time.monotonic()))
        yield from one.findings


class _Running(threading.Thread):
    """One check on a thread of its own, which is left behind when it hangs."""

    def __init__(self, name: str, check: Check, subject: Subject) -> None:
        super().__init__(name=f"check {name}", daemon=True)
        self._check_name, self._check, self._subject = name, check, subject
        self.findings: list[Finding] = [
            fail(name, "the check has not come to an end", "see what it waits for: disk, network")
        ]
        self.start()

    def run(self) -> None:
        try:
            found = self._check(self._subject)
        except Exception as error:  # noqa: BLE001 - a check that breaks is a finding
            told = f"the check itself failed: {type(error).__name__}: {error}"
            self.findings = [fail(self._check_name, told, "please report it")]
            return
        self.findings = found if isinstance(found, list) else [] if found is None else [found]
