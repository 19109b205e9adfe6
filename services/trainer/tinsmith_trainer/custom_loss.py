"""Losses that clients send as data: a graph carried out on one datum, with its gradient.

    loss, metrics = graph(logprobs, the inputs that it reads)        slope = d loss / d logprobs

The losses of datums add up. Shapes: n tokens of the datum, k targets per position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tinsmith import loss_graphs
from tinsmith.errors import InvalidRequest
from tinsmith_trainer import graph_operations
from tinsmith_trainer.loss import Loss, Terms

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinsmith.loss_graphs import LossGraph, Node
    from tinsmith_trainer.datums import Example
    from tinsmith_trainer.loss import Inputs, Settings
    from tinsmith_trainer.microbatch import Scored

NAME = "custom"
LOSS_ID = "loss_id"
_VALUE, _SLOPE = "value", "slope"  # the inputs per token that a datum's loss becomes
_FEW = 1024  # elements that every result may have, however short the datum is
_MANY = 4  # results of so many elements per element of the largest input
_TROUBLE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class _Result(NamedTuple):
    loss: Tensor
    metrics: dict[str, float]


def from_config(config: Mapping[str, float | str]) -> Loss:
    """The loss that a configuration names; InvalidRequest unless it names just that."""
    given = config.get(LOSS_ID)
    if not isinstance(given, str) or len(config) > 1:
        raise InvalidRequest(
            f"loss_fn_config: {sorted(config)} came; {NAME} takes {LOSS_ID}, the text that "
            "create_custom_loss gave"
        )
    graph = loss_graphs.from_id(given)
    program = _Program(graph)
    return Loss(
        NAME,
        {},
        {},
        _terms,
        prepare=program.prepare,
        measure=program.measure,
        takes_rows=graph.inputs[0].rank == 2,
        ranks={each.name: each.rank for each in graph.inputs},
    )


def figures(loss: Loss, examples: Sequence[Example], results: Sequence[Scored]) -> dict[str, float]:
    """The metrics of the loss over all datums; empty for losses that have none."""
    if loss.measure is None:
        return {}
    total: dict[str, float] = {}
    for example, scored in zip(examples, results, strict=True):
        inputs = {key: torch.from_numpy(value) for key, value in example.extras.items()}
        for key, value in loss.measure(torch.from_numpy(scored.logprobs), inputs).items():
            total[key] = total.get(key, 0.0) + value
    return {
        key: value / len(examples) if key.endswith(":mean") else value
        for key, value in total.items()
    }


def _terms(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Terms:
    del logprobs, settings  # the value and the slope were made of them
    return Terms(inputs[_VALUE], inputs[_SLOPE])


@dataclass(frozen=True, slots=True)
class _Program:
    loss: LossGraph

    def prepare(self, logprobs: Tensor, inputs: Inputs) -> dict[str, Tensor]:
        """The datum's loss, at its first token, and the slope of every token."""
        with torch.enable_grad():
            leaf = logprobs.detach().clone().requires_grad_()
            loss = self._run(leaf, inputs).loss
            if not loss.requires_grad:
                raise InvalidRequest(f"loss {self.loss.name!r}: it does not depend on logprobs")
            (slope,) = torch.autograd.grad(loss, leaf, materialize_grads=True)
        value = torch.zeros_like(logprobs)
        value.view(-1)[0] = loss.detach()
        return {_VALUE: value, _SLOPE: slope}

    def measure(self, logprobs: Tensor, inputs: Inputs) -> dict[str, float]:
        """The datum's metrics."""
        with torch.no_grad():
            return self._run(logprobs, inputs).metrics

    def _run(self, logprobs: Tensor, inputs: Inputs) -> _Result:
        sent = {**inputs, loss_graphs.LOGPROBS: logprobs}
        largest = max(_FEW, *(sent[each.name].numel() for each in self.loss.inputs))
        nodes = self.loss.graph.nodes
        budget = graph_operations.Budget(_MANY * len(nodes) * largest)
        values: dict[str, Any] = {}
        for node in nodes[:-1]:
            if node.op == "placeholder":
                values[node.name] = sent[node.target]
                continue
            try:
                values[node.name] = _call(node, values, budget)
            except (*_TROUBLE, InvalidRequest) as error:
                raise InvalidRequest(
                    f"loss {self.loss.name!r}, node {node.name} ({node.target}): "
                    f"{str(error).partition(chr(10))[0]}"
                ) from error
        return self._result(nodes[-1], values)

    def _result(self, node: Node, values: Mapping[str, Any]) -> _Result:
        try:
            loss, metrics = _argument(node.args[0], values)
            is_fine = isinstance(loss, Tensor) and loss.ndim == 0 and loss.is_floating_point()
            if not is_fine or not all(map(loss_graphs.METRIC.fullmatch, metrics)):
                raise ValueError(loss)
            return _Result(loss, {key: _number(value) for key, value in metrics.items()})
        except _TROUBLE as error:
            raise InvalidRequest(
                f"loss {self.loss.name!r}: it must return a scalar loss and a dict of scalar "
                "metrics named custom/<name>:sum or custom/<name>:mean"
            ) from error


def _number(value: Any) -> float:  # noqa: ANN401 - see Value
    return float(value.detach() if isinstance(value, Tensor) else value)


def _call(node: Node, values: Mapping[str, Any], budget: graph_operations.Budget) -> Any:  # noqa: ANN401 - see Value
    args = [_argument(each, values) for each in node.args]
    kwargs = {key: _argument(each, values) for key, each in node.kwargs.items()}
    budget.spend(graph_operations.sizes_of([*args, *kwargs.values()]))
    return graph_operations.checked(graph_operations.OPERATIONS[node.operation](*args, **kwargs))


def _argument(value: Any, values: Mapping[str, Any]) -> Any:  # noqa: ANN401, C901 - JSON
    """An argument in the client's encoding, with references filled in."""
    if isinstance(value, list):
        return [_argument(each, values) for each in value]
    if not isinstance(value, dict):
        return graph_operations.checked(value)
    ((kind, content),) = value.items()
    match kind:
        case "ref":
            return values[content]
        case "tuple":
            return tuple(_argument(each, values) for each in content)
        case "dict":
            return {key: _argument(each, values) for key, each in content.items()}
        case "slice":
            return slice(*(_argument(each, values) for each in content))
        case "ellipsis":
            return ...
        case "float":
            return float(content)
        case _:
            pass
    msg = f"an argument of kind {kind!r} is not allowed"
    raise ValueError(msg)
