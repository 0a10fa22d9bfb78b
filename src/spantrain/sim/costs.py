"""Seconds of actions, transfers and the end of a step: from a profile, or from a table."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

from spantrain.core.action import Action, Direction, Op
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.spans import Span
from spantrain.cost.compute import ComputeCost
from spantrain.cost.network import NetworkCost
from spantrain.sim.network import Transfer

__all__ = ["ProfileCosts", "StepCosts", "TableCosts"]


class StepCosts(Protocol):
    """Everything that a step is made of. Devices are leaders of replicas.

    Actions and transfers may depend on a span's size, not on which samples it holds: drivers ask once for each size.
    """

    @property
    def action_overhead_s(self) -> float:
        """Seconds that the runtime takes before each action."""

    def action_s(self, device: str, action: Action) -> float:
        """Return the seconds of an action on a device."""

    def transfer(self, source: str, target: str, direction: Direction, stage: int, span: Span) -> Transfer:
        """Return what it takes to send a span, produced by a stage, to a device of its neighbour."""

    def gradient_sum_s(self, stage: int) -> float:
        """Return the seconds in which a stage's replicas sum their gradients."""

    @property
    def tied_exchange_s(self) -> float:
        """Seconds in which stages sum the gradients of parameters that they share."""

    @property
    def commit_s(self) -> float:
        """Seconds of the barrier at the end of a step, in which the global gradient norm is agreed on."""

    def optimizer_s(self, device: str) -> float:
        """Return the seconds of a device's update of its parameters."""


@dataclass(frozen=True, kw_only=True)
class TableCosts:
    """Costs by stage and sample, for what-ifs and tests.

    An action takes `samples` times the stage's seconds; B takes I and W. A transfer takes the seconds of the cut behind
    the lower stage. Each pair of stages has its own link, in each direction.
    """

    sample_s: tuple[Mapping[Op, float], ...]
    """By stage: seconds per sample of F, I and W."""
    latency_s: tuple[float, ...] = ()
    """By cut."""
    forward_s: tuple[float, ...] = ()
    """By cut: seconds that a sample's activations keep the link busy."""
    backward_s: tuple[float, ...] = ()
    """By cut: the same of gradients."""
    slowness: Mapping[str, float] = field(default_factory=dict)
    """Factors on the seconds of devices."""
    action_overhead_s: float = 0.0
    tied_exchange_s: float = 0.0
    commit_s: float = 0.0
    update_s: float = 0.0
    sum_s: float = 0.0

    def action_s(self, device: str, action: Action) -> float:
        """Return the seconds of an action on a device."""
        table = self.sample_s[action.stage]
        ops = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) if action.op is Op.BACKWARD else (action.op,)
        return action.span.size * self.slowness.get(device, 1.0) * sum(table[op] for op in ops)

    def transfer(
        self,
        source: str,  # noqa: ARG002 - links belong to pairs of stages
        target: str,  # noqa: ARG002
        direction: Direction,
        stage: int,
        span: Span,
    ) -> Transfer:
        """Return what it takes to send a span; a sample counts as one byte."""
        forward = direction is Direction.FORWARD
        cut = stage if forward else stage - 1
        return Transfer(
            size_bytes=span.size,
            latency_s=self.latency_s[cut],
            occupancy_s=span.size * (self.forward_s if forward else self.backward_s)[cut],
            link=f"{stage}->{stage + 1}" if forward else f"{stage}->{stage - 1}",
        )

    def gradient_sum_s(self, stage: int) -> float:  # noqa: ARG002 - the same for all
        """Return the seconds in which a stage's replicas sum their gradients."""
        return self.sum_s

    def optimizer_s(self, device: str) -> float:  # noqa: ARG002 - the same for all
        """Return the seconds of a device's update of its parameters."""
        return self.update_s


class ProfileCosts:
    """Costs of a plan by a profile's measurements.

    `action_overhead_s`, `commit_s` and `update_s_per_byte` are the runtime's own: they are not in a profile.

    Raises:
        ProfileError: something that the plan needs was not measured (when it is asked for).
    """

    def __init__(
        self,
        profile: Profile,
        plan: Plan,
        *,
        action_overhead_s: float = 0.0,
        commit_s: float | None = None,
        update_s_per_byte: float = 0.0,
    ) -> None:
        self._graph = profile.graph
        self._plan = plan
        self._network = NetworkCost(profile)
        self._compute = ComputeCost(profile, plan.dtype)
        self._stage_of = {device: index for index, stage in enumerate(plan.stages) for device in stage.devices}
        self._update_s_per_byte = update_s_per_byte
        self.action_overhead_s = action_overhead_s
        self.commit_s = self._round_trip_s() if commit_s is None else commit_s
        self._seconds = cache(self._compute.stage_seconds)

    def action_s(self, device: str, action: Action) -> float:
        """Return the seconds of an action on a device."""
        return self._seconds(self._plan.stages[action.stage].units, device, action.op, action.span.size)

    def transfer(self, source: str, target: str, direction: Direction, stage: int, span: Span) -> Transfer:
        """Return what it takes to send a span over the measured link."""
        here = self._plan.stages[stage]
        if direction is Direction.FORWARD:
            per_sample = self._graph.units[here.end_unit - 1].cut_bytes_per_sample
        else:
            per_sample = self._graph.units[here.first_unit - 1].gradient_bytes_per_sample
        size_bytes = per_sample * span.size
        return Transfer(
            size_bytes=size_bytes,
            latency_s=self._network.link(source, target).latency_s,
            occupancy_s=self._network.occupancy_seconds(source, target, size_bytes),
            link=self._network.shared_link(source, target),
        )

    def gradient_sum_s(self, stage: int) -> float:
        """Return the seconds of a ring sum of the stage's gradients over the leaders of its replicas."""
        replicas = self._plan.stages[stage].replicas
        return self._network.all_reduce_seconds([r.devices[0] for r in replicas], self._parameter_bytes(stage))

    @property
    def tied_exchange_s(self) -> float:
        """Seconds in which each stage sends its shared gradients to every other stage that has them, one by one."""
        slowest_s: dict[str, float] = {}
        for name in self._graph.shared_bytes:
            pairs = self._tied_pairs(name)
            slowest_s[name] = max((self._network.transfer_seconds(*pair, size) for pair, size in pairs), default=0.0)
        return sum(slowest_s.values())

    def end_of_step_bytes(self) -> dict[tuple[str, str], int]:
        """Return what devices send each other behind the pipeline: ring sums of gradients, and shared gradients."""
        sent: Counter[tuple[str, str]] = Counter()
        for index, stage in enumerate(self._plan.stages):
            leaders = [replica.devices[0] for replica in stage.replicas]
            turns = 2 * (len(leaders) - 1) * self._parameter_bytes(index) // len(leaders)
            for number, leader in enumerate(leaders if turns else ()):
                sent[leader, leaders[(number + 1) % len(leaders)]] += turns
        for pair, size_bytes in self._tied_pairs():
            sent[pair] += size_bytes
        return dict(sent)

    def optimizer_s(self, device: str) -> float:
        """Return the seconds of a device's update of its parameters."""
        return self._update_s_per_byte * self._parameter_bytes(self._stage_of[device])

    def _tied_pairs(self, *names: str) -> list[tuple[tuple[str, str], int]]:
        """Return who sends whom how many bytes of shared gradients; of these parameters, or of all."""
        found = []
        for name in names or self._graph.shared_bytes:
            leaders = [stage.replicas[0].devices[0] for stage in self._plan.stages if self._holds(stage.units, name)]
            found += [((a, b), self._graph.shared_bytes[name]) for a in leaders for b in leaders if a != b]
        return found

    def _holds(self, units: range, shared: str) -> bool:
        return any(shared in self._graph.units[unit].shared for unit in units)

    def _parameter_bytes(self, stage: int) -> int:
        """Return the bytes of a stage's parameters, those that its units share counted once."""
        units = [self._graph.units[unit] for unit in self._plan.stages[stage].units]
        doubled = sum(
            size * max(0, sum(name in unit.shared for unit in units) - 1)
            for name, size in self._graph.shared_bytes.items()
        )
        return sum(unit.parameter_bytes for unit in units) - doubled

    def _round_trip_s(self) -> float:
        """Return the longest way between two leaders there and back: the least that agreeing takes."""
        leaders = [replica.devices[0] for stage in self._plan.stages for replica in stage.replicas]
        ways = [self._network.link(a, b).latency_s for a in leaders for b in leaders if a != b]
        return 2 * max(ways, default=0.0)
