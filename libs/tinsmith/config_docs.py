"""The configuration as text: valid TOML with the origin of each value and the docs of each key."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from tinsmith import __version__
from tinsmith.config import service_sections
from tinsmith.config_decode import MASK, is_secret, masked

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinsmith.config import Config, Section


def render(config: Config, *, has_docs: bool = False) -> str:
    """The resolved configuration, secrets masked; loading it again gives the same."""
    origins = config.origins
    lines = [
        f"# tinsmith {__version__}; values that are not defaults name their source",
        f"data_dir = {toml(str(config.data_dir))}{_origin(origins.get('data_dir'))}",
    ]
    blobs = msgspec.structs.replace(config.blobs, url=config.blobs_url)
    shared: dict[str, Section] = {"bus": config.bus, "blobs": blobs, "logs": config.logs}
    services = {
        name: config.section(cast("type[Section]", point.load()))
        for name, point in sorted(service_sections().items())
    }
    for name, section in (shared | services).items():
        own = {key: origins.get(f"{name}.{key}") for key in section.__struct_fields__}
        lines += ["", f"[{name}]", *_entries(section, own, has_docs=has_docs)]
    for model in config.models:
        lines += ["", f"[[models]]{_origin(origins.get('models'))}"]
        lines += _entries(model, {}, has_docs=has_docs)
    if not config.models:
        lines.insert(2, f"models = []{_origin(origins.get('models'))}")
    return "\n".join(lines) + "\n"


def _entries(section: Section, origins: dict[str, str | None], *, has_docs: bool) -> Iterator[str]:
    docs = field_docs(type(section)) if has_docs else {}
    for key in section.__struct_fields__:
        yield from textwrap.wrap(docs.get(key, ""), 96, initial_indent="# ", subsequent_indent="# ")
        value = _hidden(key, getattr(section, key))
        if value is None:
            yield f"# {key} is unset"
        else:
            yield f"{key} = {toml(value)}{_origin(origins.get(key))}"


def _origin(origin: str | None) -> str:
    return f"  # {origin}" if origin else ""


def _hidden(key: str, value: object) -> object:
    if is_secret(key) and isinstance(value, tuple | list):
        return [MASK for _ in value]
    return masked(key, value)


def toml(value: object) -> str:
    """One value in TOML's notation. Raises TypeError for what TOML has no notation for."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str() | Path():
            # JSON's escapes are a subset of TOML's, but JSON leaves DEL as it is.
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return "[" + ", ".join(toml(item) for item in value) + "]"
        case dict():
            return "{" + ", ".join(f"{toml(str(k))} = {toml(v)}" for k, v in value.items()) + "}"
        case msgspec.Struct():
            return toml({k: v for k, v in msgspec.structs.asdict(value).items() if v is not None})
        case _:
            msg = f"{value!r} has no notation in TOML"
            raise TypeError(msg)


def field_docs(cls: type[Section]) -> dict[str, str]:
    """The docstring under each field of a section, on one line each."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    docs: dict[str, str] = {}
    name = ""
    for node in cast("ast.ClassDef", body).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docs[name] = " ".join(str(node.value.value).split())
            name = ""
    return docs
