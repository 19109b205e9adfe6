"""Renders the table of messages as ``docs/protocol.md``.

python -m tinsmith.messages.describe > docs/protocol.md
"""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from tinsmith.messages import (
    anchors,
    checkpoints,
    ops,
    registry,
    sampling,
    services,
    table,
    texts,
    weights,
)
from tinsmith.messages.base import BlobRef, Failed, Tensor

_MODULES = (ops, anchors, sampling, texts, checkpoints, registry, services, weights)
_LEAVES = (Tensor, BlobRef, Failed)

_HEADER = """\
# The bus protocol

Generated from `tinsmith.messages` by `python -m tinsmith.messages.describe`; a test compares.

Every message is msgpack, a map with its tag in `t`; unknown fields are skipped, so new fields
get defaults and old logs stay readable. Tensors are little-endian bytes with a dtype and a
shape. A queued body over 512 KiB lies in the blob store, and the message is empty with a header
`Ts-Blob: <blake3>:<size>`.
"""


def page() -> str:
    """The whole page, Markdown."""
    parts = [_HEADER, *_routes(), "## Streams\n\n| stream | kind |\n|---|---|"]
    parts += [f"| `{name}` | {kind} |" for name, kind in table.STREAMS.items()]
    parts.append("\n## Messages")
    for struct in structs():
        parts.append(_describe(struct))
    return "\n".join(parts) + "\n"


def structs() -> list[type[msgspec.Struct]]:
    """Every struct of the bus, in the order of the page."""
    found: list[type[msgspec.Struct]] = list(_LEAVES)
    for module in _MODULES:
        found += [
            value
            for value in vars(module).values()
            if inspect.isclass(value)
            and issubclass(value, msgspec.Struct)
            and value.__module__ == module.__name__
        ]
    return found


def _routes() -> list[str]:
    lines = ["## Requests and replies\n\n| subject | request | reply | who |\n|---|---|---|---|"]
    lines += [
        f"| `{r.template}` | `{r.request.__name__}` | `{r.reply.__name__}` or `Failed` | {r.doc} |"
        for r in table.RPCS
    ]
    lines.append(
        "\n## Queues\n\n| subject | stream | message | answer | who |\n|---|---|---|---|---|"
    )
    lines += [
        f"| `{q.template}` | `{q.stream}` | `{q.message.__name__}` | {q.answer} | {q.doc} |"
        for q in table.QUEUES
    ]
    lines.append("\n## Events\n\n| subject | message | who |\n|---|---|---|")
    lines += [f"| `{e.template}` | `{e.message.__name__}` | {e.doc} |" for e in table.EVENTS]
    lines.append("\n## Kept for reading\n\n| subject | stream | what |\n|---|---|---|")
    lines += [
        f"| `{row.template}` | `{stream}` | {row.doc} |"
        for stream, row in (
            (table.LOG_STREAM, table.LOG_TEMPLATE),
            (table.ANCHOR_STREAM, table.ANCHOR_TEMPLATE),
            (table.RESULT_STREAM, table.RESULT_TEMPLATE),
            (table.SAMPLE_LOG_STREAM, table.SAMPLE_LOG_TEMPLATE),
            (table.LINEAGE_STREAM, table.LINEAGE_TEMPLATE),
            (table.CHUNK_STREAM, table.CHUNK_TEMPLATE),
        )
    ]
    lines += [
        f"| `{e.template}` | `{table.REGISTRY_STREAM}` | {e.doc} (`{e.message.__name__}`) |"
        for e in table.ENTITIES
    ]
    return [*lines, ""]


def _describe(struct: type[msgspec.Struct]) -> str:
    info = msgspec.inspect.type_info(struct)
    tag = getattr(info, "tag", None)
    title = f"\n### {struct.__name__}" + (f" (`{tag}`)" if tag else "")
    hints = get_type_hints(struct)
    rows = [
        f"| `{field.name}` | `{_name(hints[field.name])}` | {_default(field)} |"
        for field in msgspec.structs.fields(struct)
    ]
    doc = inspect.cleandoc(struct.__doc__ or "")
    return "\n".join([title, "", doc, "", "| field | type | default |", "|---|---|---|", *rows])


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is not msgspec.NODEFAULT:
        return f"`{field.default!r}`"
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{field.default_factory()!r}`"
    return "required"


def _name(hint: Any) -> str:  # noqa: ANN401 - any annotation
    origin, args = get_origin(hint), get_args(hint)
    if hint is type(None):
        return "None"
    if hint is Ellipsis:
        return "..."
    if origin in (Union, types.UnionType):
        return " or ".join(_name(arg) for arg in args)
    if origin is None:
        return str(getattr(hint, "__name__", hint))
    if origin.__class__.__name__ == "_SpecialForm":  # Literal
        return " or ".join(repr(arg) for arg in args)
    return f"{origin.__name__}[{', '.join(_name(arg) for arg in args)}]"


if __name__ == "__main__":
    sys.stdout.write(page())
