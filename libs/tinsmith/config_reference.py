"""Renders every section of the configuration as ``docs/configuration.md``.

python -m tinsmith.config_reference > docs/configuration.md
"""

from __future__ import annotations

import inspect
import sys
import types
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import NODEFAULT, Meta

from tinsmith import config
from tinsmith.config_docs import field_docs, toml

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinsmith.config import Section

_HEADER = """\
# Configuration

Generated from the sections in the code by `python -m tinsmith.config_reference`; a test compares.

A TOML file (`--config`, or `TINSMITH_CONFIG`) has these sections, and each key is also a variable:
`[gateway] port` is `TINSMITH_GATEWAY__PORT`, `models` is `TINSMITH_MODELS`; `TINSMITH_NATS_URL` is
short for `TINSMITH_BUS__URL`. Later wins: defaults, file, variables. A key that is not here is an
error wherever it is written, and so is a value out of its range; one line says which. `tinsmith
config show` prints what holds and where it comes from. Each service reads the sections that it
needs; `[bus]`, `[blobs]`, `[sealing]` and `[[models]]` must say the same to all of them.
"""

_SHARED: dict[str, type[Section]] = {
    "bus": config.BusConfig,
    "blobs": config.BlobsConfig,
    "logs": config.LogsConfig,
}
_BOUNDS = (("gt", "> {}"), ("ge", "≥ {}"), ("lt", "< {}"), ("le", "≤ {}"))
_LENGTHS = {"min_length": "at least {} long", "max_length": "at most {} long", "pattern": "`{}`"}


def page() -> str:
    """The document."""
    found = {name: point.load() for name, point in sorted(config.service_sections().items())}
    parts = [
        _HEADER,
        "## Outside of sections\n",
        *_table(config.TopConfig),
        "\n## `[[models]]`\n",
        f"{_about(config.ModelConfig)} One entry for each.\n",
        *_table(config.ModelConfig),
    ]
    for name, section in (_SHARED | found).items():
        parts += [f"\n## `[{name}]`\n", f"{_about(section)}\n", *_table(section)]
    return "\n".join(parts) + "\n"


def _about(section: type[Section]) -> str:
    return _text(inspect.getdoc(section) or "").partition("\n\n")[0].replace("\n", " ")


def _table(section: type[Section]) -> Iterator[str]:
    docs, hints = field_docs(section), get_type_hints(section, include_extras=True)
    yield "| key | values | default | what |\n|---|---|---|---|"
    for one in msgspec.structs.fields(section):
        cells = (f"`{one.name}`", _values(hints[one.name]), _default(one), _text(docs[one.name]))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _text(doc: str) -> str:
    return doc.replace("``", "`")


def _default(one: msgspec.structs.FieldInfo) -> str:
    value = one.default if one.default_factory is NODEFAULT else one.default_factory()
    if value is NODEFAULT:
        return "needed"
    if isinstance(value, tuple) and any(isinstance(item, config.ModelConfig) for item in value):
        return ", ".join(f"`{item.name}`" for item in value)
    return "unset" if value is None else f"`{toml(value)}`"


def _values(hint: Any) -> str:  # noqa: ANN401 - any annotation
    """What may stand there, in words: ``Annotated[int, Meta(ge=1)]`` is "whole number ≥ 1"."""
    origin, of = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return " ".join([_values(of[0]), *_limits(of[1:])])
    if origin is Literal:
        return ", ".join(f"`{toml(value)}`" for value in of)
    if origin in {Union, types.UnionType}:
        return " or ".join(_values(part) for part in of if part is not type(None))
    if origin in {tuple, list}:
        return f"list of {_values(of[0])}"
    if origin is dict:
        return f"table of {_values(of[1])}"
    return _SIMPLE.get(hint, str(getattr(hint, "__name__", hint)))


_SIMPLE = {bool: "true, false", int: "whole number", float: "number", str: "text", Any: "values"}
_SIMPLE |= {Path: "a folder", config.ModelConfig: "models, as below"}


def _limits(metas: tuple[Meta, ...]) -> Iterator[str]:
    for meta in metas:
        bounds = [sign.format(getattr(meta, key)) for key, sign in _BOUNDS if _has(meta, key)]
        if bounds:
            yield ", ".join(bounds)
        for key, words in _LENGTHS.items():
            if _has(meta, key):
                yield words.format(getattr(meta, key))


def _has(meta: Meta, key: str) -> bool:
    return getattr(meta, key) is not None


if __name__ == "__main__":
    sys.stdout.write(page())
