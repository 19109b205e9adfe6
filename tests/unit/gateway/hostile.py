"""What nobody should send: JSON, protobuf, headers, paths and queries, as Hypothesis strategies.

Nothing here names a route. The fields are those of all the bodies that the gateway knows; one
body holds them all, since a body's unknown fields are ignored.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from typing import NamedTuple
from urllib.parse import urlencode

from backports import zstd
from hypothesis import strategies as st
from tests.unit.gateway.conftest import RECORDED

from tinsmith_gateway.proto import tinsmith_wire_pb2 as pb

BOMB = bytes(40 << 20)


class Call(NamedTuple):
    """One HTTP request as it goes over the wire; ``head`` without Host, key and length."""

    target: bytes = b""
    head: tuple[bytes, ...] = ()
    body: bytes = b""


class Raw(str):
    """JSON text that no encoder writes; stands in a body until that is encoded."""


def nested(depth, opening="[", closing="]"):
    return Raw(opening * depth + "1" + closing * depth)


LITERALS = [
    *map(Raw, ("NaN", "Infinity", "-Infinity", "1e999", "-0", "1e308", "0.1", "-1", "-1.5")),
    *(
        Raw(str(sign * 2**bits + more))
        for bits in (31, 32, 53, 63, 64)
        for sign in (1, -1)
        for more in (-1, 0, 1)
    ),
    *map(
        Raw, ("1" * 300, "9" * 5000, "1." + "3" * 3000, r'"\ud800"', r'"\udfff\ud800"', '"\\u0000"')
    ),
    *map(Raw, ('{"a": 1, "a": {}}', "[", '"', "", '{"type": "', "[tr", '"\xff"', "\ufeff1")),
    *(nested(depth) for depth in (20, 200, 900, 5000)),
    *(nested(depth, '{"a":', "}") for depth in (20, 200, 900, 5000)),
    *(
        "",
        "\0",
        "a\0b",
        "../..",
        "..",
        "a/b",
        "*",
        ">",
        "ts.log.>",
        "\r\nX: y",
        "é" * 50,
        "\U0010ffff",
    ),
    *(
        "x" * 300,
        "x" * 70_000,
        "tiny/model:" + "x" * 70_000,
        {"k" * 70_000: "v"},
        {"k": "v" * 70_000},
    ),
    *(None, True, False, 0, 1, [], {}, [[]], [{}], [None], ["x"], [-1], {"type": "x"}, {"": ""}),
    *(
        {str(n): "v" for n in range(3000)},
        ["x"] * 3000,
        [2**70],
        {"k": 2**70},
        {"k": {"k": [2**70]}},
    ),
]
SHARP = [  # each of a kind
    *map(Raw, ("NaN", "1" * 300, "1e308", str(2**63), "-1", r'"\ud800"', '"\\u0000"', '"\xff"')),
    *(nested(900), nested(900, '{"a":', "}"), "x" * 70_000, "tiny/model:" + "x" * 70_000),
    *({"k": 2**70}, {"k": nested(300)}, {"k": "v" * 70_000}, ["x" * 70_000], [2**70], None, [{}]),
]
LARGE = [[2**70], {"k": 2**70}, nested(900)]
TEXTS = [text for text in LITERALS if isinstance(text, str) and not isinstance(text, Raw)]
JSONS = st.one_of(
    st.sampled_from(LITERALS),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text(max_size=9),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
        ),
        max_leaves=6,
    ),
)


def encoded(value):
    """``value`` as JSON, ``Raw`` texts in it as they are."""
    match value:
        case Raw():
            return str(value)
        case dict():
            items = (f"{json.dumps(key)}:{encoded(item)}" for key, item in value.items())
            return "{" + ",".join(items) + "}"
        case list():
            return "[" + ",".join(map(encoded, value)) + "]"
        case _:
            return json.dumps(value)


def places(value, path=()):
    """The paths to everything in a JSON value."""
    yield path
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from places(item, (*path, key))


def replaced(value, path, new):
    """``value`` with ``new`` at ``path``."""
    if not path:
        return new
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[path[0]] = replaced(value[path[0]], path[1:], new) if path[1:] else new
    return changed


@st.composite
def bodies(draw, good):
    """The good body with some fields left out, and some values anywhere in it replaced."""
    left_out = draw(st.sets(st.sampled_from(sorted(good)), max_size=1))
    body = {name: value for name, value in good.items() if name not in left_out}
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.sampled_from(list(places(body))))
        body = replaced(body, at, draw(JSONS))
        if not isinstance(body, dict):
            break
    return encoded(body).encode("utf-8", "surrogatepass")


@st.composite
def mutated(draw, data):
    """Bytes that were right before: cut, changed, repeated, or with others between them."""
    data = bytearray(data)
    for _ in range(draw(st.integers(0, 3))):
        start, end = sorted(draw(st.tuples(*[st.integers(0, len(data))] * 2)))
        match draw(st.sampled_from(["cut", "drop", "set", "insert", "repeat"])):
            case "cut":
                del data[start:]
            case "drop":
                del data[start:end]
            case "set":
                data[start : start + 1] = draw(st.binary(min_size=1, max_size=9))
            case "insert":
                data[start:start] = draw(st.binary(max_size=12))
            case "repeat":
                data[start:start] = data[start:end]
    return bytes(data)


def texts():
    """For paths, queries and headers."""
    return st.sampled_from(TEXTS) | st.text(max_size=20)


HEADERS = {
    b"Content-Type": (b"", b"x", b"text/plain", b"application/json; a", b"\xff", b"a/b/c;;="),
    b"Content-Encoding": (b"zstd", b"gzip", b"br", b"zstd, gzip", b"\xff", b""),
    b"Accept": (b"\xff", b"x" * 2000, b"application/x-protobuf"),
    b"Host": (b"", b"[", b"a b", b"\xff", b"x:99999", b"a/b", b"http://x"),
    b"Range": (b"bytes=5-1", b"bytes=-", b"x", b"bytes=0-" + b"9" * 5000),
    b"X-API-Key": (b"", b"\xff", b"tml-\xff", b"x" * 9000),
    b"X-Idempotency-Key": (b"\xff\xfe", b"x" * 5000, b"", b"a b"),
    b"X-Tinker-Weights-Access-Token": (b"\xff", b"x", b""),
    b"Expect": (b"100-continue", b"x", b""),
    b"Connection": (b"upgrade", b"\xff"),
    b"Upgrade": (b"websocket", b"h2c"),
    b"Origin": (b"http://[", b"null", b"\xff"),
    b"X" * 3000: (b"y",),
}
HEADS = st.sampled_from([name + b": " + value for name in HEADERS for value in HEADERS[name]])
READ_HEADS = [
    tuple(
        name + b": " + HEADERS[name][turn % len(HEADERS[name])] for name in HEADERS if name in read
    )
    for read in ((b"Accept", b"Range", b"X-Idempotency-Key", b"Origin"), (b"Host", b"Expect"))
    for turn in range(max(len(HEADERS[name]) for name in read))
]
"""Lines that refuse nothing by themselves, as many as can be in one request."""
QUERIES = ("limit", "offset", "project_id", "event_type", "day", "starting_on", "access_scope")
VALUES = (
    "9" * 30,
    "9" * 5000,
    "-1",
    "1_0",
    "\u0663",
    "9" * 19,
    "-" + "9" * 19,
    "accessible",
    "all",
)
TIMES = ("2026-01-31", "2026-01-31T12:00:00Z", "0001-01-01T00:00:00+23:59")


def every_query():
    """Each name with each value, all other names right."""
    right = {"starting_on": TIMES[1], "ending_before": "2026-01-31T13:00:00Z"}
    for name in (*QUERIES, "ending_before"):
        for value in TIMES if name in right or name == "day" else VALUES:
            yield urlencode(right | {name: value})


def queries():
    """Query strings: known names with any values, values that occur twice, and noise."""
    names = st.sampled_from([*QUERIES, "ending_before"])
    values = st.sampled_from(VALUES + TIMES)
    pairs = st.lists(st.tuples(names, values | texts()), max_size=4)
    noise = st.sampled_from([b"&&&=", b"%", b"%ff=%ff", b"\xff=\xff", b"a" * 5000, b"&" * 5000])
    return pairs.map(lambda found: urlencode(found, errors="surrogatepass").encode()) | noise


def parameters(template):
    """The names of a path's parameters."""
    return re.findall(r"\{(\w+)\}", template)


def codings(body):
    """(headers, body) in a coding: right, cut, wrong, and a little that becomes a lot."""
    packed = [(b"zstd", zstd.compress(body)), (b"gzip", gzip.compress(body, mtime=0))]
    packed += [(coding, data[:-3]) for coding, data in packed]
    packed += [(coding, data * 2) for coding, data in packed]
    packed += [(b"zstd", body), (b"gzip", b""), *BOMBS]
    return st.sampled_from(packed).map(lambda pair: ((b"Content-Encoding: " + pair[0],), pair[1]))


BOMBS = [(b"zstd", zstd.compress(BOMB)), (b"gzip", gzip.compress(BOMB, mtime=0))]


def recorded_training(model_id):
    """The recorded training requests in protobuf, for ``model_id``."""
    for name in sorted(RECORDED):
        if "body_b64" in RECORDED[name]:
            message = pb.ForwardBackwardRequest.FromString(
                base64.b64decode(RECORDED[name]["body_b64"])
            )
            message.model_id = model_id
            yield message.SerializeToString(deterministic=True)


def known_values(session, model, checkpoint, base_model):
    """Values that are right, by the names that bodies, paths and queries have for them."""
    graph = {
        "format": 1,
        "nodes": [
            {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
            {"op": "call_method", "name": "sum_1", "target": "sum", "args": [{"ref": "logprobs"}]},
            {"op": "output", "name": "output", "target": "output", "args": [{"ref": "sum_1"}]},
        ],
    }
    name = checkpoint.rpartition("/")[2]
    return {
        "session_id": session,
        "model_id": model,
        "run_id": model,
        "kind": "weights",
        "name": name,
        "path": checkpoint,
        "tinker_path": checkpoint,
        "source_path": checkpoint,
        "destination_project_id": "here",
        "project_id": "here",
        "base_model": base_model,
        "model_seq_id": 7,
        "seq_id": 3,
        "sampling_session_seq_id": 9,
        "lora_config": {"rank": 8, "seed": 1},
        "user_metadata": {"a": "b"},
        "optimizer_config": {"type": "adamw"},
        "adam_params": {"learning_rate": 1e-4},
        "ttl_seconds": 7200,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "sampling_params": {"max_tokens": 4, "stop": ["x"]},
        "request_id": f"{model}:0",
        "target": {"type": "sampling_session", "sampling_session_id": f"{session}:sample:0"},
        "reason": {"type": "success"},
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": graph,
        "owner": {"type": "own"},
        "sampler_id": f"{session}:sample:0",
        "limit": 10,
        "offset": 0,
    }


INT64 = st.sampled_from([0, 1, 2, 3, -1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63)])


def int64_bytes(values):
    return b"".join(value.to_bytes(8, "little", signed=True) for value in values)


@st.composite
def tensors(draw):
    """Shapes, types and bytes that need not fit together."""
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3]) | INT64, max_size=3))
    tensor = pb.Tensor(dtype=draw(st.integers(0, 6)), shape=shape)
    if draw(st.booleans()):
        tensor.dense = draw(st.binary(max_size=24))
    else:
        rows = shape[0] + 1 if shape and 0 <= shape[0] < 9 else draw(st.integers(0, 4))
        bounds = draw(st.lists(INT64, min_size=rows, max_size=rows))
        columns = draw(st.lists(INT64, max_size=4))
        tensor.sparse_csr.crow_indices = int64_bytes(bounds) + draw(st.sampled_from([b"", b"x"]))
        tensor.sparse_csr.col_indices = int64_bytes(columns)
        tensor.sparse_csr.values = draw(st.binary(max_size=24))
    return tensor


@st.composite
def training_requests(draw):
    """Well-formed protobuf, and nothing in it that must make sense."""
    names = st.sampled_from(["target_tokens", "weights", "\0", "", "x" * 70_000, "é"])
    request = pb.ForwardBackwardRequest(loss_fn=draw(names | st.just("cross_entropy")))
    for _ in range(draw(st.integers(0, 2))):
        datum = request.data.add()
        for _ in range(draw(st.integers(0, 2))):
            datum.model_input.add().encoded_text.tokens = draw(st.binary(max_size=9))
        for name in draw(st.lists(names, max_size=2, unique=True)):
            datum.loss_fn_inputs[name].CopyFrom(draw(tensors()))
        if draw(st.booleans()):
            span = datum.model_input_spans.add().sampled_tokens
            span.sequence_id, span.offset, span.length = draw(names), -1, 2**31 - 1
    number = st.floats() | st.sampled_from([float("nan"), float("inf"), 1e308])
    for name in draw(st.lists(names, max_size=2, unique=True)):
        request.loss_fn_config[name] = draw(number)
    return request


def wrapping_rows():
    """Row bounds whose differences are small and positive when 64 bits wrap around."""
    request = pb.ForwardBackwardRequest(loss_fn="cross_entropy")
    tensor = request.data.add().loss_fn_inputs["target_tokens"]
    tensor.dtype, tensor.shape[:] = pb.DTYPE_INT64, [4, 1]
    tensor.sparse_csr.crow_indices = int64_bytes([0, 2**63 - 1, -(2**63), -1, 0])
    return request
