"""Which service processes a configuration asks for, and the environment each one gets."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, cast

from tinsmith import cores, listening, whole
from tinsmith.cli.process import ServiceProcess
from tinsmith.config import service_sections

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Mapping

    from tinsmith.config import Config, Section

SERVICES = ("gateway", "trainer", "sampler", "checkpointer")
PER_MODEL = ("trainer", "sampler")
GATEWAY_RANK, WORKER_RANK, BROKER_RANK = range(3)
GATEWAY_STOP_S = 5.0
STOP_S = 5.0  # beyond what a service is given to finish its work


def instances(config: Config, services: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    """(label, service, model name or "") of each process: one per model or worker."""
    short_names = [model.name.rpartition("/")[2] for model in config.models]
    count = workers(config)
    for service in services:
        if service == "gateway" and count > 1:
            yield from ((f"gateway:{n + 1}", service, "") for n in range(count))
        elif service not in PER_MODEL:
            yield service, service, ""
        else:
            for model, short in zip(config.models, short_names, strict=True):
                unique = short if short_names.count(short) == 1 else model.name
                is_only = len(config.models) == 1
                label = service if is_only else f"{service}:{unique}"
                yield label, service, model.name
                if model.full and service == "trainer":
                    yield whole.name_of(label), service, whole.name_of(model.name)


def service_processes(
    config: Config,
    services: tuple[str, ...],
    environ: Mapping[str, str],
    address: socket.socket | None = None,
) -> list[ServiceProcess]:
    """The processes, not started; ``environ`` is what they have in common.

    ``address`` is what gateways answer on; without one, a gateway opens its own.
    """
    fds = {"gateway": () if address is None else (address.fileno(),)}
    # -P: the folder that `up` is started in must not shadow installed packages.
    command = [sys.executable, "-P", "-m", "tinsmith"]
    file = ["--config", str(config.path)] if config.path else []
    return [
        ServiceProcess(
            label,
            [*command, service, *file, *(["--model", model] if model else [])],
            {
                **environ,
                **thread_limits(config, service, environ),
                **_handed(fds.get(service, ())),
                **_metrics_port(config, index),
            },
            rank=GATEWAY_RANK if service == "gateway" else WORKER_RANK,
            pass_fds=fds.get(service, ()),
        )
        for index, (label, service, model) in enumerate(instances(config, services))
    ]


def thread_limits(config: Config, service: str, environ: Mapping[str, str]) -> dict[str, str]:
    """OpenMP settings: trainer and sampler share the cores instead of fighting for them."""
    if service not in PER_MODEL:
        return {}
    threads = int(_value(config, service, "threads"))
    chosen = environ.get("OMP_NUM_THREADS", "") if threads == 0 else str(threads)
    return {
        "OMP_NUM_THREADS": chosen or str(cores.threads(0)),
        # Waiting threads that spin would take the other service's core.
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def model_of(config: Config, service: str) -> str:
    """The model that a trainer or sampler on its own serves; "" for the first."""
    return str(_value(config, service, "model"))


def workers(config: Config) -> int:
    """How many processes are to answer as gateways at one address."""
    return int(_value(config, "gateway", "workers"))


def stop_times(config: Config) -> tuple[float, ...]:
    """Seconds after the beginning of a stop at which each rank is killed, if it is still there."""
    drains = [float(_value(config, service, "drain_s")) for service in PER_MODEL]
    ends = GATEWAY_STOP_S + STOP_S + max(drains)
    return GATEWAY_STOP_S, ends, ends + STOP_S


def gateway_host(config: Config) -> str:
    """Where the gateway listens."""
    return str(_value(config, "gateway", "host"))


def is_gateway_tls(config: Config) -> bool:
    """Whether the gateway answers over HTTPS."""
    return bool(_value(config, "gateway", "tls_cert"))


def gateway_address(config: Config) -> socket.socket:
    """What gateways answer on, opened. Raises StartupError."""
    return listening.bind(gateway_host(config), int(_value(config, "gateway", "port")))


def key_file_of(config: Config) -> str:
    """The gateway's configured file of API keys."""
    return str(_value(config, "gateway", "api_key_file"))


def _handed(fds: tuple[int, ...]) -> dict[str, str]:
    # A worker is one process, whatever the file says of workers.
    return {listening.VARIABLE: str(fds[0]), "TINSMITH_GATEWAY__WORKERS": "1"} if fds else {}


def _metrics_port(config: Config, index: int) -> dict[str, str]:
    """Each process on this machine has its own."""
    port = int(_value(config, "metrics", "port"))
    return {"TINSMITH_METRICS__PORT": str(port + index)} if port else {}


def _value(config: Config, service: str, key: str) -> str | float:
    # By name: a section's type belongs to its service, which this library must not import.
    section = config.section(cast("type[Section]", service_sections()[service].load()))
    value: str | float = getattr(section, key)
    return value
