"""Whether a service can do its work: what is missing, in words for its operator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """The answer of ``/readyz``; a service can do its work when nothing is missing."""

    missing: tuple[str, ...] = ()
    """Each a sentence."""
    models: dict[str, dict[str, str]] = field(default_factory=dict)
    """Model -> role -> who serves it, for a service that knows."""

    @property
    def status(self) -> int:
        """Of HTTP."""
        return 503 if self.missing else 200

    def body(self) -> dict[str, object]:
        """As JSON."""
        told: dict[str, object] = {"status": "not ready" if self.missing else "ok"}
        if self.missing:
            told |= {"detail": "; ".join(self.missing), "missing": self.missing}
        if self.models:
            told["models"] = self.models
        return told


class Health:
    """What the parts of a service say of themselves."""

    def __init__(self) -> None:
        self.checks: list[Callable[[], Readiness]] = []
        """Each is quick and asks nobody: what it tells is known already."""

    def readiness(self) -> Readiness:
        """All of it."""
        found = [check() for check in self.checks]
        missing = dict.fromkeys(one for each in found for one in each.missing)
        models = {name: roles for each in found for name, roles in each.models.items()}
        return Readiness(missing=tuple(missing), models=models)
