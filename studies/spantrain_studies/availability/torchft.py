"""torchft (PyTorch's fault tolerance for HSDP, github.com/pytorch/torchft): groups that each have the whole model.

Kept: replica groups, found by a lighthouse; a group drops out with any of its devices; the others lose the step under
way and go on after the next quorum; a group is back when all of its devices are there and have weights from a peer,
while the others go on. Groups are fixed for the run; how devices are divided into groups is tuned. In its favour: each
group trains by our planner's plan of it; groups have samples by their speed; samples of groups that are out are not
made up for, and steps of fewer samples count by their samples; the sum over groups hides behind a group's whole last
backward pass; a quorum takes as long as our light change. With no group left, the run waits, and begins from a
checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from spantrain.core.action import SPLIT_OPS, Op
from spantrain.core.plan import Plan
from spantrain.core.span import apportion
from spantrain.cost.moving import moved
from spantrain.cost.network import NetworkCost
from spantrain.planner.engine.predict import predict
from spantrain.sim.availability import PREPARED_S, AvailabilityEvent
from spantrain_studies.availability.layouts import Layouts
from spantrain_studies.availability.plans import OwnPlans, write_s
from spantrain_studies.availability.run import Turn, Work


@dataclass(frozen=True, kw_only=True)
class Group:
    """A replica group at work."""

    devices: frozenset[str]
    """All that must be there, whether its plan uses them or not."""
    plan: Plan
    step_s: float
    back_s: float
    """Of its last micro-batch through all stages."""
    heal_s: float
    """Until it has weights from a peer."""

    @property
    def leader(self) -> str:
        """Who sums for it."""
        return self.plan.devices[0]


def divisions(layouts: Layouts) -> list[tuple[tuple[str, ...], ...]]:
    """Return ways to divide all devices into groups: by site, by host, into single ones, and by so many."""
    cluster = layouts.profile.cluster
    ordered = layouts.in_places(layouts.fastest(frozenset(cluster.device_by_name)))
    found: list[tuple[tuple[str, ...], ...]] = [
        tuple(tuple(one.name for one in cluster.devices_at(site.name)) for site in cluster.sites),
        tuple(tuple(host.devices) for host in cluster.hosts),
    ]
    for size in (1, 2, 3, 4, 6, 8, 11, 16):
        if size < len(ordered):
            count = len(ordered) // size
            rest = ordered[count * size :]
            groups = [ordered[index * size : (index + 1) * size] for index in range(count)]
            found.append((*groups[:-1], (*groups[-1], *rest)))
    return list(dict.fromkeys(division for division in found if all(division)))


def groups_of(plans: OwnPlans, division: Sequence[tuple[str, ...]]) -> tuple[Group, ...] | None:
    """Return the groups of a division, with samples by their speed; None where the model does not fit into each."""
    even = plans.of_batch(max(1, plans.job.global_batch // len(division)))
    alone = [even.best(frozenset(names)) for names in division]
    rates = [0.0 if plan is None else plan.global_batch / even.calm_step_s(plan) for plan in alone]
    if min(rates) == 0.0 or len(division) > plans.job.global_batch:
        return None
    counts = apportion(plans.job.global_batch, rates)
    found = [
        _group(plans, names, plan)
        for names, count in zip(division, counts, strict=True)
        if count and (plan := plans.of_batch(count).best(frozenset(names))) is not None
    ]
    return tuple(found)


def _group(plans: OwnPlans, names: Sequence[str], plan: Plan) -> Group:
    spans, place = plans.job.span_tables(plans.profile), plans.profile.cluster.device_by_name
    back_s = 0.0
    for stage in plan.stages:
        size, width = stage.micro_batches[-1].size, len(stage.replicas)
        kind = place[stage.devices[0]].kind
        ops = [op for op in SPLIT_OPS if op is not Op.FORWARD]
        back_s += sum(spans.compute.kind_seconds(stage.units, kind, op, max(1, size // width)) for op in ops)
    return Group(
        devices=frozenset(names), plan=plan, step_s=predict(plan, plans.profile).step_s, back_s=back_s,
        heal_s=moved(plans.profile, plans.job.optimizer, plan, (), plan)[0],
    )  # fmt: skip


class TorchFt:
    """Goes on with the groups that are whole."""

    def __init__(self, plans: OwnPlans, groups: Sequence[Group], *, restart_s: float, every_s: float) -> None:
        """Begin with nothing; `restart_s`, `every_s`: as for `restart.Restart`, where no group is left."""
        self._plans, self._groups, self._restart_s, self.every_s = plans, groups, restart_s, every_s
        self._network = NetworkCost(plans.profile)
        self._work: Work | None = None
        self._known: dict[tuple[int, ...], Work | None] = {}

    def healed(self, events: Sequence[AvailabilityEvent]) -> list[AvailabilityEvent]:
        """Return events in which devices come when their group has its weights; who leaves before has not come."""
        heal_s = {name: group.heal_s for group in self._groups for name in group.devices}
        found: dict[str, list[AvailabilityEvent]] = {}
        for event in sorted(events, key=lambda event: event.at_s):
            own = found.setdefault(event.device, [])
            if event.comes:
                own.append(replace(event, at_s=event.at_s + heal_s.get(event.device, 0.0)))
            elif own and own[-1].at_s >= event.at_s:
                own.pop()
            else:
                own.append(event)
        return [event for own in found.values() for event in own]

    def begin(self, present: frozenset[str]) -> Work | None:
        """Train in all groups that are whole."""
        self._work = self._of(present)
        return self._work

    def lost(self, device: str, present: frozenset[str]) -> Turn:  # noqa: ARG002
        """Go on without the group, or wait."""
        self._work = self._of(present)
        return Turn(work=self._work, pause_s=PREPARED_S, back=self._work is None)

    def changed(self, present: frozenset[str]) -> Turn | None:
        """Take in groups that are whole again."""
        before, self._work = self._work, self._of(present)
        if self._work is None or self._work == before:
            return None
        if before is None:
            first = next(group for group in self._groups if group.devices <= present)
            return Turn(work=self._work, pause_s=self._restart_s + first.heal_s)
        return Turn(work=self._work)

    def _of(self, present: frozenset[str]) -> Work | None:
        key = tuple(index for index, group in enumerate(self._groups) if group.devices <= present)
        if key not in self._known:
            self._known[key] = self._work_of([self._groups[index] for index in key])
        return self._known[key]

    def _work_of(self, groups: list[Group]) -> Work | None:
        if not groups:
            return None
        units = [[stage.units for stage in group.plan.stages] for group in groups]
        return Work(
            step_s=max(group.step_s for group in groups) + self._exposed_s(groups),
            samples=sum(group.plan.global_batch for group in groups),
            devices=frozenset(name for group in groups for name in group.devices),
            write_s=min(write_s(self._plans.profile, self._plans.job.optimizer, ranges) for ranges in units),
        )

    def _exposed_s(self, groups: list[Group]) -> float:
        """Return for how long groups wait for the sum of their gradients behind the last backward pass.

        Inside a site as many rings go side by side as the smallest group has hosts; out of it they share the way.
        """
        if len(groups) == 1:
            return 0.0
        place = self._plans.profile.cluster.device_by_name
        size = sum(unit.trained_bytes for unit in self._plans.profile.graph.units)
        leaders = [group.leader for group in groups]
        if len({place[name].site for name in leaders}) == 1:
            size //= min(len({place[name].host for name in group.plan.devices}) for group in groups)
        ring_s = self._network.collectives.seconds(leaders, size)
        return max(0.0, ring_s - min(group.back_s for group in groups))
