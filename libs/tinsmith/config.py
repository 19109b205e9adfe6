"""The configuration: sections, where values come from, and the resolved result.

A service's section is defined beside the service and found by the entry-point group
``tinsmith.config``. Later sources win: defaults, the TOML file, environment variables
``TINSMITH_<SECTION>__<KEY>``. A key that no section has is an error wherever it is written.
"""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from tinsmith import model_options, paths, whole
from tinsmith.config_decode import Given, as_table, decode_section, unknown_key
from tinsmith.errors import ConfigError
from tinsmith.model_files import Quantization

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ENV_PREFIX = "TINSMITH_"
ENTRY_POINTS = "tinsmith.config"
DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section; each field has a docstring under it."""


S = TypeVar("S", bound=Section)


class BusConfig(Section, frozen=True, kw_only=True):
    """How to reach NATS."""

    url: Annotated[str, Meta(min_length=1)] = "nats://127.0.0.1:4222"
    """Address of the broker; several are separated by commas."""
    connect_timeout_s: Annotated[float, Meta(gt=0, le=60)] = 3.0
    """How long a service tries to connect before it gives up."""
    user: str = ""
    """User name, when the broker asks for one."""
    password: str = ""
    """Password of ``user``."""
    password_file: str = ""
    """File with that password, instead of ``password``."""
    token: str = ""
    """Shared token, instead of user and password."""
    credentials_file: str = ""
    """NATS ``.creds`` file (JWT and seed), instead of user and password."""
    inbox_prefix: Annotated[str, Meta(pattern="^_INBOX[A-Za-z0-9_-]*$")] = "_INBOX"
    """Begins the subjects on which this service hears answers: with one of its own, which the
    broker lets nobody else read, they are private."""
    tls_ca: str = ""
    """PEM file of the authorities that vouch for the broker; with it, or ``tls://`` in ``url``, the
    connection is TLS from its first byte on (``handshake_first`` in nats.conf)."""
    tls_cert: str = ""
    """PEM file of this service's own certificate, when the broker asks for one."""
    tls_key: str = ""
    """PEM file of the key of ``tls_cert``."""
    create_streams: bool = True
    """Create and update the streams at start. False for a user who may not: they must be there,
    made by ``tinsmith prepare``."""
    replicas: Annotated[int, Meta(ge=1, le=5)] = 1
    """Copies of every stream: 1 on a single broker, 3 on a cluster."""
    sample_log_bytes: Annotated[int, Meta(ge=1 << 20)] = 8 << 30
    """Size of the log of samples; beyond it the oldest are discarded. The same for all services."""
    sample_log_days: Annotated[float, Meta(ge=0)] = 0.0
    """Logged samples are discarded after so many days; 0: never. The same for all services."""


class BlobsConfig(Section, frozen=True, kw_only=True):
    """Where bulk bytes lie."""

    url: str = ""
    """Empty for the folder ``blobs`` in ``data_dir``; or ``file:///...``, ``s3://bucket/prefix``,
    ``memory:///``. Every service must reach the same store."""
    endpoint: str = ""
    """Address of an S3-compatible server, such as ``https://minio:9000``. Empty: the variable
    ``AWS_ENDPOINT_URL``, or else Amazon's."""
    region: str = ""
    """Empty: the variable ``AWS_REGION``, or else us-east-1."""
    access_key_id: str = ""
    """Empty: the variable ``AWS_ACCESS_KEY_ID``, or else the role of the machine."""
    secret_access_key: str = ""
    """The secret of ``access_key_id``. Empty: the variable ``AWS_SECRET_ACCESS_KEY``."""


class LogsConfig(Section, frozen=True, kw_only=True):
    """What the services write to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is written."""
    format: Literal["auto", "console", "json"] = "auto"
    """``auto``: readable text on a terminal, one JSON object per line otherwise."""


class ModelConfig(Section, frozen=True, kw_only=True):
    """A base model that is trained and sampled from."""

    name: Annotated[str, Meta(min_length=1)]
    """The name that clients ask for."""
    path: str = ""
    """Folder or hub id of the weights; empty: the cached copy when there is one, else ``name``."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the base weights in memory."""
    context_length: Annotated[int, Meta(ge=1)] | None = None
    """Longest sequence in tokens; unset: what the model's own configuration says."""
    quantization: Quantization = "none"
    """``nf4`` or ``int8``: hold the linear layers and experts of the base in 4 or 8 bits; adapters
    stay float32, and products are computed in ``dtype``. Needs ``tinsmith[quantised]``."""
    full: bool = False
    """Train all weights too, under the name with ``:full`` behind it, in a trainer of its own. It
    takes the memory of six to ten copies of the model; see ``docs/full.md``."""
    tokenizer_id: str | None = None
    """Tokenizer that clients are told to load: a hub id, or a folder on *their* machine. Unset:
    the folder in ``path``, which suits clients on this machine, else ``name``."""
    trainer: dict[str, Any] = {}
    """Settings of ``[trainer]`` for this model alone."""
    sampler: dict[str, Any] = {}
    """Settings of ``[sampler]`` for this model alone."""

    @property
    def source(self) -> str:
        """Where the weights are: a folder or a hub id."""
        return self.path or self.name

    @property
    def tokenizer(self) -> str:
        """The resolved ``tokenizer_id``."""
        return self.tokenizer_id or (self.path if Path(self.path).is_dir() else self.name)


class TopConfig(Section, frozen=True, kw_only=True):
    """What stands outside of sections."""

    data_dir: Path | None = None
    """Folder of the broker's store, the default blob store and the generated API key."""
    models: tuple[ModelConfig, ...] = (ModelConfig(name=DEFAULT_MODEL),)
    """The base models."""


_SHARED = ("bus", "blobs", "logs")
_TOP_KEYS = ("data_dir", "models")
_ALIASES = {"NATS_URL": "BUS__URL"}
# Read by others than this module.
_OTHER_VARIABLES = ("CONFIG", "CACHE", "READY_FD", "PARENT_PID", "LISTEN_FD")

Tree = dict[str, dict[str, Given]]
"""Section name ("" for the top level) -> key -> what was set."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The resolved configuration."""

    data_dir: Path = field(default_factory=paths.default_data_dir)
    bus: BusConfig = field(default_factory=BusConfig)
    blobs: BlobsConfig = field(default_factory=BlobsConfig)
    logs: LogsConfig = field(default_factory=LogsConfig)
    models: tuple[ModelConfig, ...] = (ModelConfig(name=DEFAULT_MODEL),)
    sections: tuple[Section, ...] = ()
    """Sections of services, at most one of each type; one that is absent has its defaults."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Dotted key -> the file or variable that set it; keys with default values are absent."""
    path: Path | None = None
    """The file this was read from."""

    def section(self, type_: type[S]) -> S:
        """A service's own section."""
        for section in self.sections:
            if isinstance(section, type_):
                return section
        return type_()

    @property
    def blobs_url(self) -> str:
        """The blob store's address, with the default resolved."""
        return self.blobs.url or paths.DataDir(self.data_dir.absolute()).blobs.as_uri()

    def model(self, name: str) -> ModelConfig:
        """The model of that name, or the first for ""; ConfigError names those there are.

        A name with ``:full`` gives the model as it is trained whole, under that name.
        """
        for model in self.models:
            if name in (model.name, ""):
                return model
            if name == whole.name_of(model.name):
                return _whole(model)
        names = ", ".join(repr(model.name) for model in self.models) or "none"
        raise ConfigError(
            f"model {name!r} is not configured; add it to [[models]], which has {names}"
        )


def load(path: Path | None, environ: Mapping[str, str]) -> Config:
    """Reads file and environment; ConfigError (one line) on the first mistake.

    ``path`` defaults to ``$TINSMITH_CONFIG``; without either, defaults and environment decide.
    """
    if path is None and environ.get("TINSMITH_CONFIG"):
        path = Path(environ["TINSMITH_CONFIG"]).expanduser()
    found = service_sections()
    names = (*_SHARED, *found)
    tree: Tree = {"": {}} if path is None else _from_file(path, names)
    for section, key, given in _from_environment(environ, names):
        tree.setdefault(section, {})[key] = given
    origins = {
        f"{section}.{key}".lstrip("."): given.origin
        for section, raw in tree.items()
        for key, given in raw.items()
    }
    top = decode_section(TopConfig, tree.pop(""), "")
    model_options.apply(tree, top.models, found, origins.get("models", "defaults"))
    return Config(
        bus=decode_section(BusConfig, tree.pop("bus", {}), "bus"),
        blobs=decode_section(BlobsConfig, tree.pop("blobs", {}), "blobs"),
        logs=decode_section(LogsConfig, tree.pop("logs", {}), "logs"),
        data_dir=(top.data_dir or paths.default_data_dir(environ)).absolute(),
        models=_located(top.models, environ),
        sections=tuple(decode_section(found[name].load(), raw, name) for name, raw in tree.items()),
        origins=origins,
        path=path,
    )


def service_sections() -> dict[str, EntryPoint]:
    """Names of the services' sections, and how to import their types."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def _from_file(path: Path, names: tuple[str, ...]) -> Tree:
    try:
        content = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; check --config and TINSMITH_CONFIG, or leave both out"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    tree: Tree = {"": {}}
    for name, value in content.items():
        given = Given(value, str(path))
        if name in _TOP_KEYS:
            tree[""][name] = given
        elif name not in names:
            raise unknown_key(given, name, (*_TOP_KEYS, *names))
        else:
            tree[name] = as_table(given, name)
    return tree


def _from_environment(
    environ: Mapping[str, str], names: tuple[str, ...]
) -> Iterator[tuple[str, str, Given]]:
    for variable, text in sorted(environ.items()):
        if not variable.startswith(ENV_PREFIX):
            continue
        given = Given(text, variable, is_text=True)
        plain = variable.removeprefix(ENV_PREFIX)
        section, nested, key = _ALIASES.get(plain, plain).lower().partition("__")
        if nested and section not in names:
            raise unknown_key(given, section, names)
        if nested:
            yield section, key, given
        elif section in _TOP_KEYS:
            yield "", section, given
        else:
            _refuse_near_miss(variable, plain)


def _refuse_near_miss(variable: str, plain: str) -> None:
    # Only near misses: a cluster may inject TINSMITH_GATEWAY_PORT and the like on its own.
    known = (*_ALIASES, *_OTHER_VARIABLES, *(key.upper() for key in _TOP_KEYS))
    near = difflib.get_close_matches(plain, known, n=1, cutoff=0.85)
    if near and near[0] != plain:
        raise ConfigError(f"{variable}: no such variable; did you mean {ENV_PREFIX}{near[0]}?")


def _whole(model: ModelConfig) -> ModelConfig:
    if not model.full:
        raise ConfigError(
            f"model {whole.name_of(model.name)!r} is not configured; set full = true in the "
            f"[[models]] entry of {model.name!r}"
        )
    return msgspec.structs.replace(
        model, name=whole.name_of(model.name), path=model.source, tokenizer_id=model.tokenizer
    )


def _check_whole(models: tuple[ModelConfig, ...]) -> None:
    for model in models:
        if whole.is_whole(model.name):
            raise ConfigError(
                f"models: {model.name!r} ends in {whole.SUFFIX!r}, which stands for training all "
                "weights; leave it out of the name, and set full = true"
            )
        if model.full and model.quantization != "none":
            raise ConfigError(
                f"models: {model.name!r} has full = true and quantization = "
                f"{model.quantization!r}, but rounded weights cannot be trained; make two entries "
                "of the model, or leave one of the two out"
            )


def _located(
    models: tuple[ModelConfig, ...], environ: Mapping[str, str]
) -> tuple[ModelConfig, ...]:
    """The models, each with the folder of its cached copy when its path was left open."""
    _check_whole(models)
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"models: {name!r} is listed {names.count(name)} times; names are unique"
            )
    return tuple(
        msgspec.structs.replace(model, path=str(cached))
        if not model.path and (cached := paths.model_dir(model.name, environ)).is_dir()
        else model
        for model in models
    )
