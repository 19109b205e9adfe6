"""``tinsmith up``: broker and services of one machine, from nothing to ready to stopped."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import os
import shlex
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinsmith import config, logs, paths
from tinsmith.broker import Broker
from tinsmith.cli import folder, model_check, plan
from tinsmith.cli.foreground import require_extra
from tinsmith.cli.output import LogStream
from tinsmith.cli.process import BrokerProcess
from tinsmith.cli.reach import unreachable
from tinsmith.cli.supervisor import OWN_LABEL, Supervisor, Timing, supervise
from tinsmith.errors import ConfigError, StartupError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tinsmith.config import Config

RETRY_S = 0.2
_OWN_KEY = "tml-...  # one of gateway.api_keys"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says."""

    config: Path | None = None
    data_dir: Path | None = None
    port: int | None = None
    nats_port: int = -1
    services: tuple[str, ...] = plan.SERVICES
    ready_file: Path | None = None


def run(options: Options) -> int:
    """Run until told to stop; returns the exit code.

    Raises:
        StartupError: something is missing, wrong or taken; nothing is left running.
    """
    environ = dict(os.environ)
    if options.data_dir is not None:
        environ["TINSMITH_DATA_DIR"] = str(options.data_dir.absolute())
    if options.port is not None:
        environ["TINSMITH_GATEWAY__PORT"] = str(options.port)
    loaded = config.load(options.config, environ)
    _check_parts(options.services, loaded)
    data = paths.DataDir(loaded.data_dir)
    data.prepare()
    data.require_space()
    with folder.claim(data) as lock_fd:
        asyncio.run(_Up(options, loaded, environ).run(lock_fd))
    return 0


def _check_parts(services: tuple[str, ...], loaded: Config) -> None:
    """What would fail a minute later in a child fails here at once."""
    for name in services:
        if name not in plan.SERVICES:
            near = difflib.get_close_matches(name, plan.SERVICES, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"--services: no service {name!r}; {hint}one of {plan.SERVICES}")
        require_extra(name)
    if set(services) & set(plan.PER_MODEL):
        for model in loaded.models:
            model_check.check(model)


def _metrics(supervisor: Supervisor) -> dict[str, str]:
    """Label -> where the process tells its metrics and its health."""
    told = {label: str(ready.get("metrics_url", "")) for label, ready in supervisor.ready.items()}
    return {label: url for label, url in told.items() if url}


def _targets(supervisor: Supervisor) -> list[dict[str, object]]:
    """What ``file_sd_configs`` of Prometheus reads."""
    return [
        {"targets": [url.removeprefix("http://")], "labels": {"process": label}}
        for label, url in _metrics(supervisor).items()
    ]


def _no_broker(url: str) -> str:
    return unreachable(url.strip(), default_port=4222)


class _Up:
    """One run."""

    def __init__(self, options: Options, loaded: Config, environ: Mapping[str, str]) -> None:
        self._options = options
        self._config = loaded
        self._environ = dict(environ)
        self._data = paths.DataDir(loaded.data_dir)
        self._files = [self._data.up_file]
        if options.ready_file is not None:
            self._files.append(options.ready_file)
        self._key_file = self._chosen_key_file()
        self._nats_url = loaded.bus.url

    def _chosen_key_file(self) -> str:
        """The file that holds the key to use; empty when keys stand in the configuration."""
        if "gateway.api_keys" in self._config.origins:
            return ""
        if "gateway.api_key_file" in self._config.origins:
            return plan.key_file_of(self._config)
        return str(folder.api_key_file(self._data))

    async def run(self, lock_fd: int) -> None:
        """Bring everything up, wait for the stop, take everything down."""
        services = self._options.services
        labels = [label for label, _, _ in plan.instances(self._config, services)]
        log = LogStream(
            sys.stderr,
            [OWN_LABEL, BrokerProcess.label, *labels],
            is_json=self._config.logs.format == "json",
            has_colors=logs.has_colors(sys.stderr),
        )
        self._remove_files()
        try:
            timing = Timing(stop_s=plan.stop_times(self._config))
            async with supervise(log, timing) as supervisor:
                for number in (signal.SIGINT, signal.SIGTERM):
                    asyncio.get_running_loop().add_signal_handler(number, supervisor.request_stop)
                if await self._broker_is_up(supervisor, lock_fd):
                    await self._serve(supervisor)
        finally:
            self._remove_files()

    async def _broker_is_up(self, supervisor: Supervisor, lock_fd: int) -> bool:
        if "bus.url" in self._config.origins:
            return await self._other_broker_answers(supervisor)
        broker = Broker(
            self._data.nats, self._data.run, port=self._options.nats_port, pass_fds=(lock_fd,)
        )
        is_verbose = self._config.logs.level == "debug"
        process = BrokerProcess(broker, rank=plan.BROKER_RANK, is_verbose=is_verbose)
        if not await supervisor.bring_up([process]):
            return False
        self._nats_url = self._environ["TINSMITH_NATS_URL"] = broker.url
        return True

    async def _other_broker_answers(self, supervisor: Supervisor) -> bool:
        bus, loop = self._config.bus, asyncio.get_running_loop()
        deadline = loop.time() + bus.connect_timeout_s
        while not supervisor.stopping.is_set():
            reasons = [await asyncio.to_thread(_no_broker, url) for url in bus.url.split(",")]
            if not all(reasons):
                return True
            if loop.time() > deadline:
                raise StartupError(
                    f"bus.url: no NATS server answers at {bus.url} ({reasons[0]}); start it, or "
                    f"unset {self._config.origins['bus.url']} to have 'tinsmith up' start one"
                )
            await asyncio.sleep(RETRY_S)
        return False

    async def _serve(self, supervisor: Supervisor) -> None:
        environ = self._environ
        environ["TINSMITH_DATA_DIR"] = str(self._data.root)
        if self._config.logs.format == "auto":
            environ["TINSMITH_LOGS__FORMAT"] = "console"
        if logs.has_colors(sys.stderr):
            environ["FORCE_COLOR"] = "1"
        if self._key_file:
            environ["TINSMITH_GATEWAY__API_KEY_FILE"] = self._key_file
        names = self._options.services
        with contextlib.ExitStack() as opened:
            # Held here, so that clients wait, and find it again, while a gateway is restarted.
            address = (
                opened.enter_context(plan.gateway_address(self._config))
                if "gateway" in names
                else None
            )
            services = plan.service_processes(self._config, names, environ, address)
            supervisor.on_ready = lambda: self._write_files(supervisor)
            if await supervisor.bring_up(services):
                self._greet(supervisor)
                await supervisor.stopping.wait()

    def _base_url(self, supervisor: Supervisor) -> str:
        urls = (told.get("url", "") for told in supervisor.ready.values())
        return next((str(url) for url in urls if str(url).startswith("http")), "")

    def _write_files(self, supervisor: Supervisor) -> None:
        content: dict[str, object] = {
            "base_url": self._base_url(supervisor),
            "api_key_file": self._key_file,
            "nats_url": self._nats_url,
            "pids": {OWN_LABEL: os.getpid(), **supervisor.pids},
        }
        content["metrics"] = _metrics(supervisor)
        for path in self._files:
            folder.write_json(path, content)
        folder.write_json(self._data.scrape_file, _targets(supervisor))

    def _remove_files(self) -> None:
        for path in (*self._files, self._data.scrape_file):
            folder.remove(path)

    def _greet(self, supervisor: Supervisor) -> None:
        lines = [f"Tinsmith is ready: {', '.join(supervisor.ready)}. Ctrl-C stops it."]
        if base_url := self._base_url(supervisor):
            # The key itself stays out of terminals' histories and of logs.
            key = f'"$(cat {shlex.quote(self._key_file)})"' if self._key_file else _OWN_KEY
            lines += [
                "In the shell of your training script:",
                f"  export TINKER_BASE_URL={base_url}",
                f"  export TINKER_API_KEY={key}",
            ]
        sys.stdout.write("\n" + "\n".join(lines) + "\n\n")
        sys.stdout.flush()
