"""Backward in two halves, I and W: the one place that touches torch's private `stage_backward_*` functions.

They come from `torch.distributed.pipelining._backward`. What is known of them, and pinned by tests:

- I keeps the graph, and with it what W needs, so memory is freed at W; it detaches the outputs in place (a
  view cannot be, so outputs must not be views).
- Parameters come back in groups. A parameter used in several places can put two groups in the way of each other:
  such groups are joined here, or W would count a gradient twice or fail.
- A parameter that reaches an output without meeting an input's path is in no group, and nothing says so: found
  here by walking the graph once.
- W stores a gradient without copying it when `.grad` is None, so that `.grad` can be the very tensor that was sent
  to another stage: `.grad` is therefore zeroed first.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

__all__ = ["PendingWeights", "SplitBackward"]

_LOGGER = logging.getLogger(__name__)

Group = dict[str, Any]


@dataclass(kw_only=True)
class PendingWeights:
    """What W still has to do for one span; it holds the part of the graph that W needs."""

    groups: list[Group] = field(default_factory=list)


class SplitBackward:
    """Runs I and W of one module, given its parameters, for any number of spans in any order.

    A module that cannot be split gets its full backward at I, and nothing is left for W; this is logged once.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, name: str) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._name = name
        self._splits = True
        self._checked: frozenset[int] = frozenset()

    @property
    def splits(self) -> bool:
        """Whether I and W are still done separately."""
        return self._splits

    def backward_input(
        self, outputs: Sequence[Tensor], output_gradients: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], PendingWeights]:
        """Return the gradients of `inputs` (leaves that require grad), and what is left for W.

        Outputs must require grad, be no views, and have one gradient each. An input that nothing depends on gets
        zeros.
        """
        edges = [get_gradient_edge(output) for output in outputs]
        if not self._splits:
            return self._fused(edges, output_gradients, inputs), PendingWeights()
        try:
            found, groups = stage_backward_input(
                list(outputs), list(output_gradients), list(inputs), iter(self._parameters)
            )
        except RuntimeError as error:
            if isinstance(error.__cause__, torch.OutOfMemoryError):
                raise
            self._give_up(f"torch says: {error.__cause__ or error}")
            _clear(inputs)
            return self._fused(edges, output_gradients, inputs), PendingWeights()
        _clear(inputs)
        gradients = _zeros_for_missing(found, inputs)
        groups = _joined(groups)
        if not self._complete(groups, edges):
            self._give_up("some parameters reach an output on a path that meets no input's")
            self._fused(edges, output_gradients, [])
            return gradients, PendingWeights()
        return gradients, PendingWeights(groups=groups)

    def backward_weight(self, pending: PendingWeights) -> None:
        """Add the parameters' gradients of one span to their `.grad`."""
        for group in pending.groups:
            for node in group["params"]:
                if node.variable.grad is None:
                    node.variable.grad = torch.zeros_like(node.variable)
        stage_backward_weight(iter(self._parameters), pending.groups)
        pending.groups.clear()

    def backward(
        self, outputs: Sequence[Tensor], output_gradients: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Do both halves at once; return the gradients of `inputs`."""
        return self._fused([get_gradient_edge(output) for output in outputs], output_gradients, inputs)

    def _fused(
        self, edges: Sequence[GradientEdge], output_gradients: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        if edges:
            torch.autograd.backward(list(edges), list(output_gradients))
        gradients = _zeros_for_missing([leaf.grad for leaf in inputs], inputs)
        _clear(inputs)
        return gradients

    def _complete(self, groups: Sequence[Group], edges: Sequence[GradientEdge]) -> bool:
        """Whether every parameter that the outputs depend on is in a group; walks the graph only on news."""
        wanted = {id(parameter) for parameter in self._parameters}
        grouped = frozenset(id(node.variable) for group in groups for node in group["params"])
        if grouped == self._checked:
            return True
        if wanted & _reachable_leaves(edges) != grouped:
            return False
        self._checked = grouped
        return True

    def _give_up(self, reason: str) -> None:
        self._splits = False
        _LOGGER.warning("%s: backward cannot be split into I and W, so I does all of it; %s", self._name, reason)


def _clear(inputs: Sequence[Tensor]) -> None:
    for leaf in inputs:
        leaf.grad = None


def _zeros_for_missing(gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(
        torch.zeros_like(leaf) if gradient is None else gradient
        for gradient, leaf in zip(gradients, inputs, strict=True)
    )


def _joined(groups: Sequence[Group]) -> list[Group]:
    """Join groups that have a parameter or a node in common; others stay as they are."""
    separate: list[Group] = []
    for group in groups:
        joined = group
        apart = []
        for other in separate:
            if joined["params"].isdisjoint(other["params"]) and not set(joined["intermediates"]).intersection(
                other["intermediates"]
            ):
                apart.append(other)
                continue
            gradients = dict(zip(other["intermediates"], other["grads"], strict=True))
            gradients.update(zip(joined["intermediates"], joined["grads"], strict=True))
            joined = {
                "params": other["params"] | joined["params"],
                "intermediates": list(gradients),
                "grads": list(gradients.values()),
            }
        separate = [*apart, joined]
    return separate


def _reachable_leaves(edges: Sequence[GradientEdge]) -> set[int]:
    """Return the ids of the leaf tensors that the edges depend on."""
    waiting: list[Node] = [edge.node for edge in edges]
    seen = set(waiting)
    leaves: set[int] = set()
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return leaves
