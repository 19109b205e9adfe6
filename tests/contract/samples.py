"""One full instance of every bus message, every field set to something but its default."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import inspect as mi

from tinsmith.messages.describe import structs


def samples() -> dict[str, msgspec.Struct]:
    """By class name."""
    return {struct.__name__: _value(mi.type_info(struct), struct.__name__) for struct in structs()}


def _value(kind: mi.Type, name: str) -> Any:
    match kind:
        case mi.StructType():
            fields = {f.name: _value(f.type, f.name) for f in kind.fields}
            return kind.cls(**fields)
        case mi.UnionType():
            return _value(kind.types[0], name)
        case mi.VarTupleType():
            return (_value(kind.item_type, name),)
        case mi.DictType():
            return {"key": _value(kind.value_type, name)}
        case mi.LiteralType():
            return kind.values[-1]
        case _:
            return _leaf(kind, name)


def _leaf(kind: mi.Type, name: str) -> Any:
    match kind:
        case mi.StrType():
            return name
        case mi.BytesType():
            return name.encode()
        case mi.BoolType():
            return True
        case mi.IntType():
            return 7
        case mi.FloatType():
            return 0.5
        case mi.AnyType():
            return "any"
    raise TypeError(f"no sample for {kind}")
