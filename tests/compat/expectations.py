"""What the clients' methods and commands come to where that is not a success, and why."""

from __future__ import annotations

from typing import NamedTuple

NOT_CALLED = {
    "SamplingClient.on_queue_state_change": "the client itself calls it when its work has to wait",
    "tinker checkpoint push-hf": "uploads a downloaded checkpoint to a third party",
}


class Refusal(NamedTuple):
    """A call that does not succeed: with which text, and for the reader, why."""

    names: tuple[str, ...]
    text: str
    why: str
    versions: tuple[str, ...] | None = None  # None: all that have it

    def covers(self, name: str, version: str) -> bool:
        return name in self.names and (self.versions is None or version in self.versions)


REFUSALS = (
    Refusal(
        ("RestClient.get_audit_log_async",),
        "client called from incorrect event loop",
        "a fault of the client, whatever the server: the method without `_async` works",
        versions=("0.22.2", "0.25.0", "0.30.4"),
    ),
    Refusal(
        ("tinker checkpoint delete",),
        "Got unexpected extra argument",
        "a fault of the client, whatever the server: with `--run-id` instead of paths it works",
        versions=("0.18.1", "0.22.2"),
    ),
)


def refusal(name: str, version: str) -> Refusal | None:
    """The one that is expected of a call, if any is."""
    return next((one for one in REFUSALS if one.covers(name, version)), None)
