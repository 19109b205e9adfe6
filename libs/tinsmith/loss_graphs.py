"""Loss functions that clients send as data: what such a graph may hold, and its id.

A graph is a list of operations on tensors. Nothing in it is a program: every operation is looked
up by name among those below and carried out by the trainer's own code. The id of a loss *is* the
graph, packed; so a request that names it is complete, and nothing has to be stored.
"""

from __future__ import annotations

import base64
import re
import sys
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tinsmith.errors import InvalidRequest

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MAX_NODES = 256
MAX_INPUTS = 16
MAX_NAME = 200
MAX_BYTES = 64 << 10  # of a graph, unpacked
PREFIX = "loss:"
_DEEPEST = 12  # levels of an argument
LOGPROBS = "logprobs"
METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")

_MODULES = {
    "torch",
    "torch.functional",
    "torch.nn.functional",
    "torch.special",
    "torch._C._nn",
    "operator",
}
_NAMES = (
    "abs add all amax amin and_ any cat ceil clamp clamp_max clamp_min clip clone contiguous cos "
    "cumsum detach div divide eq exp expit expm1 flatten float floor full_like ge getattr getitem "
    "gt invert isfinite isnan le log log1p log_sigmoid log_softmax logical_and logical_not "
    "logical_or logsigmoid logsumexp lt masked_fill max maximum mean min minimum mul multiply ne "
    "neg negative numel ones_like or_ pos pow reciprocal relu reshape rsqrt sigmoid sign sin size "
    "softmax softplus sqrt square squeeze stack sub subtract sum tanh truediv true_divide "
    "unsqueeze view where zeros_like"
)
OPERATIONS = frozenset(_NAMES.split())
"""Functions and methods by the last part of their names; all of them leave their inputs alone."""

Name = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")]


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One operation; arguments in the client's encoding (see ``argument``)."""

    op: Literal["placeholder", "call_function", "call_method", "output"]
    name: Name
    target: Annotated[str, Meta(max_length=200)]
    args: list[Any] = []
    kwargs: dict[str, Any] = {}

    @property
    def operation(self) -> str:
        """Which of ``OPERATIONS`` it calls."""
        return self.target.rpartition(".")[2]


class Graph(msgspec.Struct, frozen=True, kw_only=True):
    """Operations in the order of their execution."""

    format: Literal[1]
    nodes: Annotated[list[Node], Meta(min_length=2, max_length=MAX_NODES)]


class Input(msgspec.Struct, frozen=True, kw_only=True):
    """What the loss reads of each datum: a scalar, [n] or [n, k]."""

    name: Name
    rank: Literal[0, 1, 2]


class LossGraph(msgspec.Struct, frozen=True, kw_only=True):
    """A loss function of one datum."""

    name: Annotated[str, Meta(max_length=MAX_NAME)]
    inputs: Annotated[list[Input], Meta(min_length=1, max_length=MAX_INPUTS)]
    graph: Graph


def check(loss: LossGraph) -> None:
    """InvalidRequest unless it is made of known operations in an order that can be carried out."""
    names = [each.name for each in loss.inputs]
    if names[0] != LOGPROBS or loss.inputs[0].rank == 0 or len(set(names)) < len(names):
        raise InvalidRequest(
            f"inputs: {names} must begin with {LOGPROBS!r} of rank 1 or 2, and each be named once"
        )
    seen: set[str] = set()
    for index, node in enumerate(loss.graph.nodes):
        at = f"graph.nodes[{index}] ({node.name})"
        if node.name in seen:
            raise InvalidRequest(f"{at}: there is a node of this name already")
        _check_target(node, at, names)
        missing = _refs([node.args, node.kwargs]) - seen
        if missing:
            raise InvalidRequest(f"{at}: refers to {min(missing)!r}, which is not before it")
        if (node.op == "output") != (index == len(loss.graph.nodes) - 1):
            raise InvalidRequest(f"{at}: the output node must be the last one, and only that")
        seen.add(node.name)


def loss_id(loss: LossGraph) -> str:
    """The id by which ``loss`` is named; InvalidRequest when it cannot be used or is too large."""
    check(loss)
    try:
        raw = msgspec.msgpack.encode(loss)
    except OverflowError as error:
        raise InvalidRequest(f"graph: a number has more than 64 bits ({error})") from error
    if len(raw) > MAX_BYTES:
        raise InvalidRequest(f"graph: {len(raw)} bytes are over the limit of {MAX_BYTES}")
    return PREFIX + base64.urlsafe_b64encode(zstd.compress(raw)).decode()


def from_id(text: str) -> LossGraph:
    """The loss named by an id; InvalidRequest when there is none."""
    try:
        if not text.startswith(PREFIX):
            raise ValueError(text)  # noqa: TRY301 - one answer to whatever is wrong
        packed = base64.b64decode(text[len(PREFIX) :], altchars=b"-_", validate=True)
        raw = zstd.ZstdDecompressor().decompress(packed, max_length=MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ValueError(len(raw))  # noqa: TRY301 - as above
        loss = msgspec.msgpack.decode(raw, type=LossGraph)
    except (ValueError, EOFError, RecursionError, zstd.ZstdError, msgspec.MsgspecError) as error:
        raise InvalidRequest(
            f"loss_id: {text[:40]!r} is not an id of this server; take that of create_custom_loss"
        ) from error
    check(loss)
    return loss


def _check_target(node: Node, at: str, inputs: list[str]) -> None:
    match node.op:
        case "placeholder":
            if node.target not in inputs:
                raise InvalidRequest(f"{at}: {node.target!r} is not one of the inputs {inputs}")
        case "call_function":
            module = node.target.rpartition(".")[0]
            is_getattr = node.target in ("getattr", "builtins.getattr")
            if not is_getattr and (
                module not in _MODULES
                or node.operation not in OPERATIONS
                or node.operation == "getattr"
            ):
                raise InvalidRequest(f"{at}: {node.target!r} is not allowed; {_ALLOWED}")
        case "call_method":
            if node.target not in OPERATIONS - {"getattr"}:
                raise InvalidRequest(f"{at}: method {node.target!r} is not allowed; {_ALLOWED}")
        case "output":
            pass


_ALLOWED = (
    f"allowed are {', '.join(sorted(OPERATIONS))}; any other loss can run in the client, with "
    "forward_backward_custom"
)


def _refs(value: Any, depth: int = 0) -> set[str]:  # noqa: ANN401 - JSON
    if depth > _DEEPEST:
        raise InvalidRequest(f"graph: an argument has more than {_DEEPEST} levels; use less")
    if isinstance(value, dict):
        if isinstance(name := value.get("ref"), str):
            return {name}
        value = list(value.values())
    if isinstance(value, list):
        return {name for each in value for name in _refs(each, depth + 1)}
    return set()
