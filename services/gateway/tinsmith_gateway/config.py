"""The gateway's section of the configuration."""

from __future__ import annotations

import urllib.parse
from typing import Annotated

from msgspec import Meta, field

from tinsmith.config import Section
from tinsmith.pools import POOL_PATTERN
from tinsmith_gateway.openness import is_loopback

MIB = 1 << 20


class GatewayConfig(Section, frozen=True, kw_only=True):
    """Where the gateway listens, who may call it, and its limits."""

    host: str = "127.0.0.1"
    """Address to listen on; ``0.0.0.0`` for every interface."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8400
    """TCP port; 0 lets the system choose."""
    workers: Annotated[int, Meta(ge=1, le=64)] = 1
    """Processes that answer on the address together; one that dies is started again."""
    tls_cert: str = ""
    """PEM file of a certificate and those that vouch for it: the gateway answers over HTTPS."""
    tls_key: str = ""
    """PEM file of the key of ``tls_cert``."""
    public_url: str = ""
    """Address under which clients reach the gateways, for the links that they are given; by default
    the one that the request was sent to."""
    api_keys: tuple[str, ...] = ()
    """Keys that clients may present; each starts with ``tml-``."""
    operators: tuple[str, ...] = ()
    """Owners, by name or id, whose keys see everything on the dashboard: services, queues, and the
    runs of all owners. The key that ``tinsmith up`` has made does so by itself."""
    api_key_file: str = ""
    """File with one key a line, ``#`` starts a comment. Without this and ``api_keys``, the key in
    ``data_dir`` that ``tinsmith up`` has made is the only one."""
    open_mode: bool = False
    """Take requests without a key, from this machine only; ``host`` must be a loopback address."""
    exchange_keys: bool = False
    """Have clients exchange their key for a token, and send that with every other request."""
    token_lifetime_s: Annotated[float, Meta(ge=120, le=86400)] = 900.0
    """How long such a token is good for; clients renew it at half of that."""
    max_body_bytes: Annotated[int, Meta(ge=MIB)] = 64 * MIB
    """Largest training request as it is received; the client's chunks are about 5 MB."""
    max_inflated_bytes: Annotated[int, Meta(ge=MIB)] = 256 * MIB
    """Largest training request once decompressed, and with its sparse tensors made dense."""
    max_json_bytes: Annotated[int, Meta(ge=MIB)] = 16 * MIB
    """Largest request in JSON, decompressed; all others wait while one is decoded."""
    max_datums: Annotated[int, Meta(ge=1)] = 4096
    """Most datums of one training request; the client sends 1024 at most."""
    max_request_tokens: Annotated[int, Meta(ge=1)] = 1 << 24
    """Most tokens of one request: those of its datums, or of the prompt and of all continuations
    that a sampling request asks for."""
    max_unfinished: Annotated[int, Meta(ge=1)] = 20_000
    """Most training and sampling requests of one owner, at all gateways together, that are not
    done; more are answered with 429, and sent again by the client. A key can have its own."""
    sampling_share: Annotated[int, Meta(ge=1)] = 1000
    """Most sampling requests of one owner that samplers are given at a time; more are held until
    some are done, and their clients are told their place. A key can have its own."""
    pools: dict[str, Annotated[str, Meta(pattern=POOL_PATTERN)]] = field(default_factory=dict)
    """Which pool of samplers serves whom: by training run, by name or id of an owner, or by base
    model. The first two go before what a client wishes, the last one behind it."""
    compress_training_requests: bool = False
    """Ask clients to send training data as zstd: less network, more work on both sides."""
    batch_polls: bool = False
    """Ask clients to wait for all samples of a sampling session with one poll, instead of one for
    each: fewer connections, results a moment later."""
    announce_bytes: Annotated[int, Meta(ge=0)] = MIB
    """A larger result is first announced by its size, for the client to make room."""
    max_samples: Annotated[int, Meta(ge=1)] = 1024
    """Most continuations that one sampling request may ask for."""
    max_topk_logprobs: Annotated[int, Meta(ge=0)] = 128
    """Most alternatives per token that a sampling request may ask for."""
    session_timeout_s: Annotated[float, Meta(ge=120)] = 300.0
    """A session without a sign of life for so long is over and its models are released."""
    long_poll_s: Annotated[float, Meta(gt=0, le=40)] = 30.0
    """How long a poll for a result is held open, and at least seven tenths of that; the client
    gives up after 45 s."""
    recheck_s: Annotated[float, Meta(gt=0)] = 5.0
    """How often it is looked for held polls whose work is done, in case the pings that should have
    woken them were lost."""
    service_stale_s: Annotated[float, Meta(gt=0)] = 10.0
    """A trainer or sampler that has been silent for so long counts as gone."""
    no_worker_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Sampling from a model that no sampler has served for so long fails. Training waits, and its
    client is told why."""

    def __post_init__(self) -> None:
        """Open mode is for this machine alone."""
        host = urllib.parse.urlsplit(self.public_url).hostname or self.host
        for key, where in (("host", self.host), ("public_url", host)):
            if self.open_mode and not is_loopback(where):
                msg = (
                    f"open_mode: {key} is {where!r}, where others can come in without a key; "
                    "listen on 127.0.0.1, or turn open_mode off and use keys"
                )
                raise ValueError(msg)
