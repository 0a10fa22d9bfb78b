"""Seconds of actions, transfers and the end of a step: from a profile, or from a table."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise, permutations, product

from spantrain.core.action import Action, Direction, Op
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.records import Record
from spantrain.core.span import Span
from spantrain.cost.network import Hops, Uses, scarce_links, sum_slowdowns
from spantrain.cost.replicas import ReplicaCost, rings_of
from spantrain.cost.sums import around
from spantrain.schedule.layout import Router
from spantrain.sim.transfers import TransferCost


class TiedSum(Record):
    """The sum of one parameter's gradients over the stages that share it."""

    stages: tuple[int, ...]
    seconds: float


class StepCosts(ABC):
    """Everything that a step is made of. Devices are leaders of replicas.

    Actions and transfers may depend on a span's size, not on which samples it holds: drivers ask once for each size.
    What a subclass does not say takes no time.
    """

    action_overhead_s: float = 0.0
    """Seconds that the runtime takes before each action."""
    commit_s: float = 0.0
    """Seconds of the barrier at the end of a step, in which the global gradient norm is agreed on."""

    @abstractmethod
    def action_s(self, device: str, action: Action) -> float:
        """Return the seconds of an action on a device."""

    @abstractmethod
    def transfer(self, source: str, target: str, direction: Direction, stage: int, span: Span) -> TransferCost:
        """Return what it takes to send a span, produced by a stage, to a device of its neighbour."""

    def gradient_sum_s(self, stage: int) -> float:
        """Return the seconds in which a stage's replicas sum their gradients."""
        return sum(self.gradient_bucket_s(stage))

    def gradient_bucket_s(self, stage: int) -> tuple[float, ...]:  # noqa: ARG002
        """Return the same, bucket by bucket."""
        return ()

    def bucket_parts(self, device: str, action: Action) -> tuple[float, ...]:  # noqa: ARG002
        """Return, for each bucket of its stage, after which part of a last backward action its gradients are whole.

        A stage's `sums` say whether a bucket is summed as soon as that (`core.plan.GradientSums`).
        """
        return (1.0,) * len(self.gradient_bucket_s(action.stage))

    def sum_slowdowns(self, stages: frozenset[int]) -> Mapping[int, float]:
        """Return by stage how many times as long its gradient sum takes while those of all these stages run."""
        return dict.fromkeys(stages, 1.0)

    def tied_sums(self) -> tuple[TiedSum, ...]:
        """Return the sums of parameters that stages share, in their order; a stage does its own one by one."""
        return ()

    def optimizer_s(self, device: str) -> float:  # noqa: ARG002
        """Return the seconds of a device's update of its parameters."""
        return 0.0


class ChangedTransfers(StepCosts):
    """Other costs, with transfers that take something else; all else is as it was."""

    def __init__(self, costs: StepCosts, change: Callable[[str, str, TransferCost], TransferCost]) -> None:
        """Keep costs, and what makes another transfer of one from a device to another."""
        self._costs, self._change = costs, change
        self.action_overhead_s, self.commit_s = costs.action_overhead_s, costs.commit_s
        for name in ("gradient_bucket_s", "bucket_parts", "sum_slowdowns", "tied_sums", "optimizer_s"):
            setattr(self, name, getattr(costs, name))

    def action_s(self, device: str, action: Action) -> float:
        """Return the seconds of an action on a device."""
        return self._costs.action_s(device, action)

    def transfer(self, source: str, target: str, direction: Direction, stage: int, span: Span) -> TransferCost:
        """Return what it takes to send a span."""
        return self._change(source, target, self._costs.transfer(source, target, direction, stage, span))


@dataclass(frozen=True, kw_only=True)
class TableCosts(StepCosts):
    """Costs by stage and sample, for what-ifs.

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

    def action_s(self, device: str, action: Action) -> float:  # noqa: ARG002 - the same for all of a stage
        """Return the seconds of an action."""
        table = self.sample_s[action.stage]
        ops = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) if action.op is Op.BACKWARD else (action.op,)
        return action.span.size * sum(table[op] for op in ops)

    def transfer(
        self,
        source: str,  # noqa: ARG002 - links belong to pairs of stages
        target: str,  # noqa: ARG002
        direction: Direction,
        stage: int,
        span: Span,
    ) -> TransferCost:
        """Return what it takes to send a span; a sample counts as one byte."""
        forward = direction is Direction.FORWARD
        cut = stage if forward else stage - 1
        return TransferCost(
            size_bytes=span.size,
            latency_s=self.latency_s[cut],
            occupancy_s=span.size * (self.forward_s if forward else self.backward_s)[cut],
            links=(f"{stage}->{stage + 1}" if forward else f"{stage}->{stage - 1}",),
        )


class ProfileCosts(StepCosts):
    """Costs of a plan by a profile's measurements.

    What the runtime itself takes is as the profile has it (`RuntimeCosts`, where it was measured). Without it, actions
    follow each other at once and the barrier takes the longest way there and back.
    `replicas` are the costs of the same profile and dtype, for those who ask for many plans.

    Raises:
        ProfileError: something that the plan needs was not measured (when it is asked for).
    """

    def __init__(self, profile: Profile, plan: Plan, *, replicas: ReplicaCost | None = None) -> None:
        runtime = profile.runtime
        self._graph = profile.graph
        self._plan = plan
        self._replicas = ReplicaCost(profile, plan.dtype) if replicas is None else replicas
        self._network = self._replicas.groups.network
        self._message_s = runtime.message_s if runtime else 0.0
        self.action_overhead_s = runtime.action_s if runtime else 0.0
        self._replica_of = {replica.devices[0]: replica for stage in plan.stages for replica in stage.replicas}
        # What was measured holds the update, too: of a small model, and of a large one at least the part per step.
        self.commit_s = runtime.step_end_s if runtime else self._network.round_trip_s(self._leaders(profile))
        self._seconds = cache(self._action_s)
        self._transfers = cache(self._transfer)
        self._buckets_s = cache(lambda stage: self._replicas.end_of_step_s(plan.stages[stage]))
        self._beside = cache(lambda stage: self._replicas.buckets_beside(plan.stages[stage]))

    def _leaders(self, profile: Profile) -> list[str]:
        """Return the leaders; of a site where nobody measured, two of two hosts, since what is described is alike."""
        if profile.links or not profile.links_described:
            return list(self._replica_of)
        by_site: dict[str, dict[str, list[str]]] = {}
        for name in self._replica_of:
            site, host = self._network.place(name)
            by_site.setdefault(site, {}).setdefault(host, []).append(name)
        return [name for hosts in by_site.values() for names in list(hosts.values())[:2] for name in names[:2]]

    def action_s(self, device: str, action: Action) -> float:
        """Return the seconds of an action on a device."""
        return self._seconds(action.stage, device, action.op, action.span.size)

    def _action_s(self, stage: int, leader: str, op: Op, samples: int) -> float:
        return self._replicas.action_s(self._plan.stages[stage], self._replica_of[leader], op, samples)

    def optimizer_s(self, device: str) -> float:
        """Return the seconds of an update where it is the host's; those of devices are in what was measured."""
        return sum(self._replicas.host_update_s(stage) for stage in self._plan.crew_of(device).stages)

    @cached_property
    def _uses(self) -> Mapping[tuple[str, str], Uses]:
        """By sender and receiver: the links that others can make scarce, each with the part that they take alone."""
        return scarce_links(self._network, _talking_pairs(self._plan))

    @cached_property
    def _uses_of_neighbours(self) -> Mapping[tuple[str, str], Uses]:
        """Return the same were all replicas of neighbouring stages to talk: where a search cuts the batch otherwise."""
        pairs = [
            pair
            for stage, following in pairwise(self._plan.stages)
            for a, b in product(stage.replicas, following.replicas)
            if a.devices != b.devices
            for pair in ((a.devices[0], b.devices[0]), (b.devices[0], a.devices[0]))
        ]
        return scarce_links(self._network, dict.fromkeys(pairs))

    def transfer(self, source: str, target: str, direction: Direction, stage: int, span: Span) -> TransferCost:
        """Return what it takes to send a span over the measured link."""
        return self._transfers(source, target, direction, stage, span.size)

    def _transfer(self, source: str, target: str, direction: Direction, stage: int, samples: int) -> TransferCost:
        here = self._plan.stages[stage]
        if direction is Direction.FORWARD:
            per_sample = self._graph.units[here.end_unit - 1].forward_bytes(here.wire_format)
        else:
            wire_format = self._plan.stages[stage - 1].wire_format
            per_sample = self._graph.units[here.first_unit - 1].backward_bytes(wire_format)
        size_bytes = per_sample * samples
        uses = self._uses.get((source, target)) or self._uses_of_neighbours[source, target]
        return TransferCost(
            size_bytes=size_bytes,
            latency_s=self._network.link(source, target).latency_s + self._message_s,
            occupancy_s=self._network.occupancy_seconds(source, target, size_bytes),
            links=tuple(name for name, _ in uses),
            usage=tuple(part for _, part in uses),
        )

    def gradient_bucket_s(self, stage: int) -> tuple[float, ...]:
        """Return the seconds of what a stage's replicas exchange at the end of a step (`cost.replicas`), by bucket."""
        return self._buckets_s(stage)

    def bucket_parts(self, device: str, action: Action) -> tuple[float, ...]:
        """Return, for each bucket, after which part of a last backward action on a device its gradients are whole."""
        buckets = self._beside(action.stage)
        if buckets is None:
            return (1.0,) * len(self._buckets_s(action.stage))
        stage, replica = self._plan.stages[action.stage], self._replica_of[device]
        return self._replicas.parts_until_whole(buckets, stage, replica, action.op, action.span.size)

    def sum_slowdowns(self, stages: frozenset[int]) -> Mapping[int, float]:
        """Return by stage how many times as long its gradient sum takes while those of all these stages run."""
        return self._slowdowns(stages) if self._sums_meet else dict.fromkeys(stages, 1.0)

    @cached_property
    def _sums_meet(self) -> bool:
        """Whether sums of stages share a link that is too narrow for all of them."""
        return any(ratio > 1.0 for ratio in self._slowdowns(frozenset(range(len(self._plan.stages)))).values())

    def _slowdowns(self, stages: frozenset[int]) -> dict[int, float]:
        hops = {stage: hops for stage, hops in self._hops.items() if stage in stages}
        return dict.fromkeys(stages, 1.0) | sum_slowdowns(self._network, hops)

    @cached_property
    def _hops(self) -> Mapping[int, Hops]:
        """Return by stage, of those that sum anything, what goes round its rings in a turn, all of them at once."""
        found = {}
        for index, stage in enumerate(self._plan.stages):
            rings = rings_of(stage)
            size = max((self._replicas.largest_bucket_bytes(stage, ring) for ring in rings), default=0.0)
            if size:
                found[index] = [(pair, size / len(ring.devices)) for ring in rings for pair in around(ring.devices)]
        return found

    def tied_sums(self) -> tuple[TiedSum, ...]:
        """Return the sum of each shared parameter that is trained, as the runtime does it.

        The first replica of each stage that holds it sends its gradients to the first replica of every other one; then
        the replicas of each stage hand the sum round, along a binomial tree. Leaders of tensor-parallel groups stand
        for their groups, with whole bytes.
        """
        found = []
        for name, size_bytes in self._graph.trained_shared_bytes.items():
            stages = self._holders(name)
            if len(stages) > 1:
                rows = [[replica.devices[0] for replica in self._plan.stages[i].replicas] for i in stages]
                exchange_s = self._network.exchange_s([row[0] for row in rows], size_bytes)
                round_s = max(self._network.collectives.broadcast_s(row, size_bytes) for row in rows)
                found.append(TiedSum(stages=stages, seconds=exchange_s + self._message_s + round_s))
        return tuple(found)

    def end_of_step_bytes(self) -> dict[tuple[str, str], int]:
        """Return what devices send each other in a step besides samples: sums and gathers, and shared gradients."""
        sent: Counter[tuple[str, str]] = Counter()
        for stage in self._plan.stages:
            sent += self._replicas.sent_bytes(stage)
        for pair, size_bytes in self.tied_bytes().items():
            sent[pair] += size_bytes
        return dict(sent)

    def tied_bytes(self) -> dict[tuple[str, str], int]:
        """Return what leaders send each other of gradients that stages share."""
        sent: Counter[tuple[str, str]] = Counter()
        for name, size_bytes in self._graph.trained_shared_bytes.items():
            for pair in permutations([self._plan.stages[i].replicas[0].devices[0] for i in self._holders(name)], 2):
                sent[pair] += size_bytes
        return dict(sent)

    def _holders(self, shared: str) -> tuple[int, ...]:
        """Return the stages that hold a parameter; of those of the same devices, which sum nothing, the first."""
        units = self._graph.units
        return tuple(
            crew.numbers[0] for crew in self._plan.crews if any(shared in units[unit].shared for unit in crew.units)
        )


def _talking_pairs(plan: Plan) -> dict[tuple[str, str], None]:
    """Return the leaders that send each other samples, in both directions."""
    router = None
    pairs: dict[tuple[str, str], None] = {}
    for index, (stage, following) in enumerate(pairwise(plan.stages)):
        sizes, others = stage.sizes_by_replica, following.sizes_by_replica
        alike = sizes == others and stage.micro_batches == following.micro_batches
        for number, replica in enumerate(stage.replicas):
            leader = replica.devices[0]
            if alike or len(others) == 1:
                there = following.replicas[number if alike else 0].devices[0]
                targets = {there} if sizes[number] else set()
            else:
                router = router or Router(plan)
                sent = (router.destinations(index, Direction.FORWARD, span) for span in stage.replica_spans(number))
                targets = {target for pieces in sent for target, _ in pieces}
            for target in sorted(targets - {leader}):
                pairs[leader, target] = pairs[target, leader] = None
    return pairs
