"""Backward in two halves, I and W: the one place that touches torch's private `stage_backward_*` functions.

They come from `torch.distributed.pipelining._backward`. What is known of them, and pinned by tests:

- I keeps the graph, and with it what W needs, so memory is freed at W; it detaches the outputs in place (a
  view cannot be, so outputs must not be views).
- Parameters come back in groups. A parameter used in several places can put two groups in the way of each other:
  such groups are joined here, or W would count a gradient twice or fail. A group that starts from several nodes may
  also pass through another group's on its way (a layer that is run several times, a bias that all layers add): found
  here by walking the graph once, and joined too.
- A parameter that reaches an output without meeting an input's path is in no group, or only in one for its other
  ways, and nothing says so: found here by walking the graph once.
- W stores a gradient without copying it when `.grad` is None, so that `.grad` can be the very tensor that was sent
  to another stage: `.grad` is therefore zeroed first.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

_LOGGER = logging.getLogger(__name__)

Group = dict[str, Any]
Final = Callable[[Iterable[nn.Parameter]], None]
"""Is told parameters to whose gradients a pass adds nothing more, while it runs; of the last pass they are final."""


@dataclass(kw_only=True)
class PendingWeights:
    """What W still has to do for one span; it holds the part of the graph that W needs."""

    groups: list[Group] = field(default_factory=list)

    @property
    def gradients(self) -> tuple[Tensor, ...]:
        """Those inside the graph that W starts from."""
        found = (gradient for group in self.groups for several in group["grads"] or () for gradient in several or ())
        return tuple(gradient for gradient in found if gradient is not None)


class SplitBackward:
    """Runs I and W of one module, given its parameters, for any number of spans in any order.

    A module that cannot be split gets its full backward at I, and nothing is left for W; this is logged once.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, name: str) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._name = name
        self._splits = True
        self._checked: frozenset[int] | None = None
        self._cluster: dict[int, int] = {}  # of a parameter: parameters of one cluster are in one group

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
        input_nodes = [get_gradient_edge(leaf).node for leaf in inputs]
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
        groups = self._apart(_joined(groups), input_nodes)
        if not self._complete(groups, edges, input_nodes):
            self._give_up("some parameters reach an output on a path that meets no input's")
            self._fused(edges, output_gradients, [])
            return gradients, PendingWeights()
        return gradients, PendingWeights(groups=groups)

    def backward_weight(self, pending: PendingWeights, final: Final | None = None) -> None:
        """Add the parameters' gradients of one span to their `.grad`, the last layers' first."""
        place = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        groups = sorted(pending.groups, key=lambda group: -max(place[id(node.variable)] for node in group["params"]))
        pending.groups.clear()
        waiting = {id(node.variable) for group in groups for node in group["params"]}
        if final is not None:
            final(parameter for parameter in self._parameters if id(parameter) not in waiting)
        for group in groups:
            found = [node.variable for node in group["params"]]
            for parameter in found:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            stage_backward_weight(iter(found), [group])
            if final is not None:
                final(found)

    def backward(
        self,
        outputs: Sequence[Tensor],
        output_gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
        final: Final | None = None,
    ) -> tuple[Tensor, ...]:
        """Do both halves at once; return the gradients of `inputs`."""
        edges = [get_gradient_edge(output) for output in outputs]
        if final is None:
            return self._fused(edges, output_gradients, inputs)
        reached = _reachable_leaves(edges)
        final(parameter for parameter in self._parameters if id(parameter) not in reached)
        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda own: final((own,)))  # type: ignore[no-untyped-call]
            for parameter in self._parameters
            if id(parameter) in reached
        ]
        try:
            return self._fused(edges, output_gradients, inputs)
        finally:
            for hook in hooks:
                hook.remove()

    def _fused(
        self, edges: Sequence[GradientEdge], output_gradients: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        if edges:
            torch.autograd.backward(list(edges), list(output_gradients))
        gradients = _zeros_for_missing([leaf.grad for leaf in inputs], inputs)
        _clear(inputs)
        return gradients

    def _apart(self, groups: list[Group], input_nodes: Sequence[Node]) -> list[Group]:
        """Join groups that pass through each other's nodes; walks the graph only on news."""
        several = any(len(group["intermediates"]) > 1 for group in groups)
        known = all(id(node.variable) in self._cluster for group in groups for node in group["params"])
        if several and not known:
            self._cluster |= _clusters(groups, input_nodes)
        if not self._cluster:
            return groups
        rows: dict[object, list[Group]] = {}
        for group in groups:
            first = min(self._cluster.get(id(node.variable), id(node.variable)) for node in group["params"])
            rows.setdefault(first, []).append(group)
        return [row[0] if len(row) == 1 else _union(row) for row in rows.values()]

    def _complete(self, groups: Sequence[Group], edges: Sequence[GradientEdge], input_nodes: Sequence[Node]) -> bool:
        """Whether the groups have every way from an output to a parameter; walks the graph only on news."""
        wanted = {id(parameter) for parameter in self._parameters}
        grouped = frozenset(id(node.variable) for group in groups for node in group["params"])
        if grouped == self._checked:
            return True
        if wanted & _reachable_leaves(edges) != grouped:
            return False
        from_inputs = _leading_to([edge.node for edge in edges], set(input_nodes)) | set(input_nodes)
        if wanted & _reachable_leaves([edge for edge in edges if edge.node not in from_inputs]):
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
            joined = _union([other, joined])
        separate = [*apart, joined]
    return separate


def _union(groups: Sequence[Group]) -> Group:
    gradients: dict[Node, object] = {}
    for group in groups:
        gradients.update(zip(group["intermediates"], group["grads"], strict=True))
    return {
        "params": set().union(*(group["params"] for group in groups)),
        "intermediates": list(gradients),
        "grads": list(gradients.values()),
    }


def _clusters(groups: Sequence[Group], input_nodes: Sequence[Node]) -> dict[int, int]:
    """Number the parameters so that those of groups with a node in common on their ways have one number."""
    starts = [node for group in groups for node in group["intermediates"]]
    from_inputs = _leading_to(starts, set(input_nodes))
    found: dict[Node, int] = {}
    cluster = list(range(len(groups)))
    for number, group in enumerate(groups):
        beginnings = set(group["intermediates"])
        # Of a group that starts from one node, no way goes on through a node that depends on inputs.
        closed = from_inputs - beginnings if len(beginnings) == 1 else set()
        for node in _leading_to(list(beginnings), group["params"], closed):
            other = cluster[found.setdefault(node, number)]
            own = cluster[number]
            cluster = [other if entry == own else entry for entry in cluster]
    return {id(node.variable): cluster[number] for number, group in enumerate(groups) for node in group["params"]}


def _leading_to(starts: Sequence[Node], targets: set[Node], closed: set[Node] | None = None) -> set[Node]:
    """Return the nodes, targets left out, on ways from the starts to a target that avoid closed nodes."""
    leads: dict[Node, bool] = {}
    waiting: list[tuple[Node, bool]] = [(node, False) for node in starts]
    while waiting:
        node, done = waiting.pop()
        following = [other for other, _ in node.next_functions if other is not None]
        if done:
            leads[node] = any(other in targets or leads.get(other, False) for other in following)
        elif node not in leads and not (closed and node in closed):
            leads[node] = False
            waiting.append((node, True))
            waiting += [(other, False) for other in following if other not in targets]
    return {node for node, leading in leads.items() if leading}


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
