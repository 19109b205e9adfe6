"""Whether a gateway can do its work: the broker is there, and somebody who trains and samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinsmith.health import Readiness

if TYPE_CHECKING:
    from tinsmith.messages.services import ServiceAlive
    from tinsmith_gateway.gateway import Gateway
    from tinsmith_gateway.liveness import Role

ROLES: tuple[Role, ...] = ("trainer", "sampler")


def readiness(gateway: Gateway, *, needs_workers: bool = True) -> Readiness:
    """What is missing, and who serves each model that was ever announced.

    With one model's trainer away the others' clients are served all the same, so only a role that
    nobody has at all makes the gateway unready. Without ``needs_workers`` not even that does.
    """
    missing: tuple[str, ...] = () if gateway.bus.is_connected else (_NO_BROKER,)
    if needs_workers and not missing:
        missing = tuple(_nobody(gateway))
    models: dict[str, dict[str, str]] = {}
    for served in sorted(gateway.registry.served, key=lambda one: (one.name, one.role)):
        alive = _alive(gateway, served.role, served.name)
        models.setdefault(served.name, {})[served.role] = _told(alive)
    return Readiness(missing=missing, models=models)


_NO_BROKER = "the message broker cannot be reached; is NATS running?"
_NOBODY = "none running"


def is_degraded(found: Readiness) -> bool:
    """Whether a model lacks somebody, or has somebody in trouble."""
    told = [text for roles in found.models.values() for text in roles.values()]
    return any(text == _NOBODY or ";" in text for text in told)


def _nobody(gateway: Gateway) -> list[str]:
    announced = {one.role for one in gateway.registry.served}
    if not announced:
        return ["no trainer and no sampler has ever been ready; start them"]
    return [
        f"no {role} is running; start one with 'tinsmith {role}'"
        for role in ROLES
        if role in announced
        and not any(_alive(gateway, role, one.name) for one in gateway.registry.served)
    ]


def _alive(gateway: Gateway, role: Role, model: str) -> list[ServiceAlive]:
    return gateway.services.serving(role, model, gateway.config.service_stale_s)


def _told(alive: list[ServiceAlive]) -> str:
    if not alive:
        return _NOBODY
    fenced = sum(int(one.load.get("weights_fenced", 0)) for one in alive)
    troubles = dict.fromkeys(one.trouble for one in alive if one.trouble)
    words = [f"{fenced} fenced from the weights of a model"] if fenced else []
    return "; ".join([f"{len(alive)} running", *words, *troubles])
