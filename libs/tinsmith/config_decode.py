"""One configuration value at a time: from TOML or an environment variable to its type.

Every refusal is one line that names where the value came from, the key, the value, and what
would be accepted.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args, get_origin

import msgspec
from msgspec import inspect as mi

from tinsmith.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

S = TypeVar("S", bound=msgspec.Struct)

_SECRET_RE = re.compile(r"(^|_)(password|token|secret|secret_access_key|api_keys?|credential)$")
_USERINFO_RE = re.compile(r"(?<=://)[^/@\s]+(?=@)")
MASK = "***"


class Given(NamedTuple):
    """A value somebody set, and where; ``is_text`` when it came as an environment string."""

    value: Any
    origin: str
    is_text: bool = False


def is_secret(key: str) -> bool:
    """Whether the value of this key must never be shown; paths of secrets may be."""
    return _SECRET_RE.search(key.rpartition(".")[2]) is not None


def dotted(parent: str, name: str) -> str:
    """The full name of a key; those outside of sections have no parent."""
    return f"{parent}.{name}" if parent else name


def masked(key: str, value: object) -> object:
    """``value`` as it may be shown: secrets and credentials in URLs are hidden."""
    if is_secret(key):
        return MASK if value else value
    if isinstance(value, str):
        return _USERINFO_RE.sub(MASK, value)
    return value


def unknown_key(given: Given, key: str, valid: Iterable[str]) -> ConfigError:
    """The error for a misspelt key: says which one was probably meant."""
    parent, _, name = key.rpartition(".")
    names = sorted(valid)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    home = f"[{parent}]" if parent else "the top level"
    return ConfigError(
        f"{given.origin}: {key}: no such key; {hint}{home} accepts {', '.join(names)}"
    )


def decode_section(cls: type[S], raw: Mapping[str, Given], key: str) -> S:
    """A section from what was set of it; ConfigError on the first wrong key or value."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(cls)}
    for name, given in raw.items():
        if name not in fields:
            raise unknown_key(given, dotted(key, name), fields)
    values = {
        fields[name].name: _decode(fields[name].type, given, dotted(key, name))
        for name, given in raw.items()
    }
    origin = ", ".join(dict.fromkeys(given.origin for given in raw.values())) or "defaults"
    missing = [name for name, field in fields.items() if field.required and name not in raw]
    if missing:
        raise ConfigError(f"{origin}: [{key}] lacks the required key {missing[0]!r}")
    try:
        return cls(**values)
    except ValueError as error:  # a range check in __post_init__
        raise ConfigError(f"{origin}: [{key}]: {error}") from None


def _decode(type_: object, given: Given, key: str) -> object:
    if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        return decode_section(type_, as_table(_parsed(given), key), key)
    item = _section_item(type_)
    if item is None:
        return _leaf(type_, given, key)
    given = _parsed(given)
    if not isinstance(given.value, list):
        raise _refused(type_, given, key)
    entries = [given._replace(value=value, is_text=False) for value in given.value]
    return tuple(
        decode_section(item, as_table(entry, f"{key}[{n}]"), f"{key}[{n}]")
        for n, entry in enumerate(entries)
    )


def _section_item(type_: object) -> type[msgspec.Struct] | None:
    if get_origin(type_) is not tuple:
        return None
    item = get_args(type_)[0]
    return item if isinstance(item, type) and issubclass(item, msgspec.Struct) else None


def as_table(given: Given, key: str) -> dict[str, Given]:
    """The entries of a TOML table; ConfigError when it is something else."""
    if not isinstance(given.value, dict):
        raise ConfigError(f"{given.origin}: {key} = {_shown(key, given.value)}: must be a table")
    return {name: given._replace(value=value) for name, value in given.value.items()}


def _leaf(type_: object, given: Given, key: str) -> object:
    # An environment variable has no types of its own: the lax mode reads "8", "0.5" or "true"
    # as what the key wants; lists and tables are written as in TOML or JSON.
    is_scalar = given.is_text and not _is_container(mi.type_info(type_))
    value = given.value if is_scalar else _parsed(given).value
    try:
        return msgspec.convert(value, type_, strict=not is_scalar, dec_hook=_dec_hook)
    except msgspec.ValidationError:
        raise _refused(type_, given, key) from None


def _parsed(given: Given) -> Given:
    if not given.is_text:
        return given
    try:
        value = tomllib.loads(f"value = {given.value}")["value"]
    except tomllib.TOMLDecodeError:
        try:
            value = json.loads(given.value)
        except ValueError:
            return given._replace(is_text=False)  # a plain word; the type check names it
    return given._replace(value=value, is_text=False)


def _dec_hook(type_: type, value: object) -> object:
    if type_ is Path and isinstance(value, str):
        return Path(value).expanduser()
    msg = f"{type_} cannot be made from {value!r}"
    raise TypeError(msg)


def _refused(type_: object, given: Given, key: str) -> ConfigError:
    info = mi.type_info(type_)
    accepted = describe(info)
    if given.is_text and _is_container(info):
        accepted += ', written as ["a", "b"] or {key = "value"}'
    return ConfigError(f"{given.origin}: {key} = {_shown(key, given.value)}: must be {accepted}")


def _shown(key: str, value: object) -> str:
    text = json.dumps(masked(key, value), default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _is_container(info: mi.Type) -> bool:
    if isinstance(info, mi.UnionType):
        return any(_is_container(option) for option in info.types)
    return isinstance(info, mi.CollectionType | mi.TupleType | mi.DictType | mi.StructType)


def describe(info: mi.Type) -> str:
    """What a key accepts, in words: ``an integer from 1 to 65535``."""
    if isinstance(info, mi.UnionType):
        return " or ".join(describe(t) for t in info.types if not isinstance(t, mi.NoneType))
    words = _WORDS.get(type(info))
    return words(info) if words else "a valid value"


def _text(info: mi.StrType) -> str:
    if info.pattern:
        return f"text that matches {info.pattern}"
    return "a non-empty string" if info.min_length else "a string"


def _bounds(info: mi.IntType | mi.FloatType) -> str:
    low = info.ge if info.ge is not None else info.gt
    high = info.le if info.le is not None else info.lt
    above = "more than " if info.gt is not None else ""
    below = "less than " if info.lt is not None else ""
    if low is not None and high is not None:
        return f" from {above}{low} to {below}{high}"
    if low is not None:
        return f" of {above or 'at least '}{low}"
    return f" of {below or 'at most '}{high}" if high is not None else ""


_WORDS: dict[type, Callable[[Any], str]] = {
    mi.LiteralType: lambda info: "one of " + ", ".join(json.dumps(v) for v in info.values),
    mi.BoolType: lambda _: "true or false",
    mi.IntType: lambda info: "an integer" + _bounds(info),
    mi.FloatType: lambda info: "a number" + _bounds(info),
    mi.StrType: _text,
    mi.VarTupleType: lambda info: f"a list, each item {describe(info.item_type)}",
    mi.ListType: lambda info: f"a list, each item {describe(info.item_type)}",
    mi.DictType: lambda info: f"a table, each value {describe(info.value_type)}",
    mi.StructType: lambda _: "a table",
    mi.CustomType: lambda info: "a path" if info.cls is Path else "a valid value",
}
