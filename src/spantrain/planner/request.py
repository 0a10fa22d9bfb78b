"""What every strategy is asked, for which job, and what it answers."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import cached_property

from spantrain.core.cluster import Cluster, Device
from spantrain.core.plan import Plan, Stage
from spantrain.core.profile import Profile
from spantrain.core.records import Record
from spantrain.core.update.optimizers import STATE_COPIES, division_refusal
from spantrain.cost.span_tables import SpanTables
from spantrain.errors import InfeasiblePlanError, PlanError
from spantrain.formats.registry import WireFormat
from spantrain.planner.dividing import TensorParallel
from spantrain.schedule.registry import splits_backward

_MAX_MICRO_BATCHES = 256


class JobSpec(Record):
    """What is to be trained: samples per step, optimizer, dtype, order of work, micro-batch sizes."""

    global_batch: int
    optimizer: str = "adamw"
    """By the state that a parameter has (`core.update.optimizers.STATE_COPIES`)."""
    dtype: str | None = None
    """None: the profile's own."""
    schedule: str = "critical-path"
    micro_batches: tuple[int, ...] = ()
    """Sizes to try; empty: powers of two, their triples that divide the global batch, and the global batch itself."""
    fewest_samples: int = 0
    """Needed at once where samples depend on each other (`UnitGraph.fewest_samples`): smaller sizes are not tried."""

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise PlanError(f"global_batch must be at least 1, got {self.global_batch}")
        if self.optimizer not in STATE_COPIES:
            raise PlanError(f"optimizer must be one of {', '.join(STATE_COPIES)}, got {self.optimizer!r}")
        wrong = [size for size in self.micro_batches if not 1 <= size <= self.global_batch]
        small = [size for size in (*self.micro_batches, self.global_batch) if size < self.fewest_samples]
        if small:
            raise InfeasiblePlanError(
                f"samples of this model depend on each other, and of fewer than {self.fewest_samples} at once nothing "
                f"is learnt: name larger micro-batches and global batches than {small[0]}"
            )
        if wrong:
            raise PlanError(f"micro_batches must lie in 1 to the global batch, {self.global_batch}; got {wrong}")

    @property
    def splits_backward(self) -> bool:
        """Whether its schedule goes back in I and W."""
        return splits_backward(self.schedule)

    def span_tables(self, profile: Profile, points: Sequence[int] | None = None) -> SpanTables:
        """Return the table of seconds and bytes over spans of units, for this job's optimizer, dtype and schedule."""
        return SpanTables(profile, self.optimizer, self.dtype, splits=self.splits_backward, points=points)

    def plan_of(
        self, profile: Profile, stages: Iterable[Stage], *, schedule: str | None = None, strategy: str = ""
    ) -> Plan:
        """Return the plan of these stages for this job, in its own schedule or another one."""
        return Plan(
            cluster=profile.cluster,
            model=profile.model,
            global_batch=self.global_batch,
            dtype=self.dtype or profile.dtype,
            stages=tuple(stages),
            schedule=schedule or self.schedule,
            strategy=strategy,
        )

    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Return the sizes to try, rising."""
        if self.micro_batches:
            return tuple(sorted(set(self.micro_batches)))
        total = self.global_batch
        powers = [2**k for k in range(total.bit_length())]
        triples = [3 * size for size in powers if total % (3 * size) == 0]
        sizes = {size for size in (*powers, *triples, total) if self.fewest_samples <= size <= total}
        return tuple(sorted(size for size in sizes if total <= size * _MAX_MICRO_BATCHES))


class Objective(StrEnum):
    """What the best plan has the least of."""

    THROUGHPUT = "throughput"
    """Seconds per step."""
    COST = "cost"
    """US dollars per step, egress included."""
    ENERGY = "energy"
    """Joules per sample."""


class Restriction(StrEnum):
    """Which plans are looked at."""

    NONE = "none"
    """All that our runtime runs."""
    MEGATRON = "megatron"
    """1F1B, one micro-batch size, as many replicas in every stage, tensor-parallel groups inside hosts."""


class Quota(Record):
    """The most devices of a kind that may be used, in one site or in all."""

    kind: str
    count: int
    site: str | None = None
    """None: over all sites."""

    @property
    def what(self) -> str:
        """What it counts, in words."""
        return f"{self.kind} in {self.site}" if self.site else self.kind

    def covers(self, device: Device) -> bool:
        """Whether a device counts against it."""
        return device.kind == self.kind and self.site in (None, device.site)


class Constraints(Record):
    """What a plan must keep to; None and empty: anything goes."""

    min_samples_per_s: float | None = None
    max_step_s: float | None = None
    max_usd_per_step: float | None = None
    max_usd_per_hour: float | None = None
    quotas: tuple[Quota, ...] = ()
    leave_out: tuple[str, ...] = ()
    """Devices or sites that must not be used."""
    keep: tuple[str, ...] = ()
    """Devices that must be used, and sites of which at least one device must be."""
    wire_formats: tuple[WireFormat, ...] = (WireFormat.NATIVE,)
    """What cuts between sites may be sent as."""
    tensor_parallel: TensorParallel = TensorParallel.AUTO
    """Where `auto` may divide tensors."""
    recompute: bool = True
    """Whether activations may be computed again where memory is short."""
    recompute_all: bool = False
    """Whether all of them are, as gradient checkpointing has it."""
    sequence_parallel: bool = False
    """Whether tensor-parallel groups hold slices of the sequence between divided layers, wherever they can."""
    sharded_state: bool = False
    """Whether the replicas of a stage may divide its gradients, optimizer state and parameters, whatever it gains."""
    divided_updates: bool = True
    """Whether they may where nothing else fits, or all else is clearly worse."""
    second_level: bool = True
    """False: to `spantrain`, a first-level group is one stage whose devices share evenly (its paper's ablation)."""
    interleaving: bool = True
    """Whether `auto` may give devices several stages each."""

    def __post_init__(self) -> None:
        if self.recompute_all and not self.recompute:
            raise PlanError("to compute all activations again and none exclude each other")
        for name in ("min_samples_per_s", "max_step_s", "max_usd_per_step", "max_usd_per_hour"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise PlanError(f"{name} must be positive, got {value}")

    def with_quotas_of(self, cluster: Cluster) -> "Constraints":
        """Return these with the quotas of a cluster's sites, where none was asked for that site and kind."""
        asked = {(quota.site, quota.kind) for quota in self.quotas}
        more = tuple(
            Quota(kind=kind, count=count, site=site.name)
            for site in cluster.sites
            for kind, count in site.quotas.items()
            if (site.name, kind) not in asked
        )
        return replace(self, quotas=self.quotas + more) if more else self

    def slowest_step_s(self, global_batch: int) -> float:
        """Return the seconds of the longest step that keeps the limits on time; infinite where there are none."""
        rate = self.min_samples_per_s
        return min(self.max_step_s or math.inf, math.inf if rate is None else global_batch / rate)

    def allowed_devices(self, cluster: Cluster) -> tuple[str, ...]:
        """Return the devices that are not left out, in the cluster's order; quotas are not applied.

        Raises:
            PlanError: a name is unknown, constraints contradict each other, a quota is larger than what the cluster
                has, or nothing is left.
        """
        known = {device.name for device in cluster.devices} | {site.name for site in cluster.sites}
        problems = [
            f"cannot {verb} {name}: {cluster.name} has {', '.join(sorted(known))}"
            for verb, names in (("leave out", self.leave_out), ("keep", self.keep))
            for name in sorted(set(names) - known)
        ]
        problems += [f"{name} is both to be kept and left out" for name in sorted({*self.keep} & {*self.leave_out})]
        for quota in self.quotas:
            have = sum(quota.covers(device) for device in cluster.devices)
            if not 0 <= quota.count <= have:
                kinds = Counter(device.kind for device in cluster.devices if quota.site in (None, device.site))
                there = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "no such site"
                problems.append(
                    f"a quota of {quota.count} {quota.what}: {cluster.name} has {have} of them; "
                    f"{quota.site or 'in all'}: {there}"
                )
        out = set(self.leave_out)
        left = tuple(device for device in cluster.devices if not {device.name, device.site} & out)
        problems = problems or self._contradictions(cluster, left)
        if not problems and not left:
            problems = [f"leaving out {', '.join(self.leave_out)} leaves no device of {cluster.name}"]
        if problems:
            raise PlanError("; ".join(problems))
        return tuple(device.name for device in left)

    def _contradictions(self, cluster: Cluster, left: tuple[Device, ...]) -> list[str]:
        """Return which demands cannot be kept together; all names are known."""
        names = {device.name for device in left}
        kept = [cluster.device_by_name[name] for name in self.keep if name in cluster.device_by_name]
        found = [
            f"{device.name} is to be kept and its site {device.site} left out"
            for device in kept
            if device.name not in names and device.name not in self.leave_out
        ]
        sites = {name: cluster.devices_at(name) for name in self.keep if name in cluster.site_by_name}
        found += [
            f"{site} is to be kept and all its devices left out"
            for site, devices in sites.items()
            if site not in self.leave_out and not names & {device.name for device in devices}
        ]
        found += [
            f"{site} is to be kept, and the quotas leave none of its devices"
            for site, devices in sites.items()
            if any(device.name in names for device in devices)
            and all(any(quota.count == 0 and quota.covers(device) for quota in self.quotas) for device in devices)
        ]
        for quota in self.quotas:
            count = sum(quota.covers(device) for device in kept)
            if count > quota.count:
                found.append(f"{count} {quota.what} are to be kept, the quota is {quota.count}")
        if left and not self._under_quotas(left):
            found.append(f"the quotas leave none of {', '.join(device.name for device in left)}")
        return found

    def _under_quotas(self, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        """Return the devices that the quotas leave: those to keep first, then those of the largest sites."""
        at_site = Counter(device.site for device in devices)

        def wanted(device: Device) -> bool:
            return bool({device.name, device.site} & set(self.keep))

        order = sorted(
            range(len(devices)), key=lambda index: (not wanted(devices[index]), -at_site[devices[index].site], index)
        )
        room = [quota.count for quota in self.quotas]
        taken = []
        for index in order:
            covering = [number for number, quota in enumerate(self.quotas) if quota.covers(devices[index])]
            if all(room[number] > 0 for number in covering):
                taken.append(index)
                for number in covering:
                    room[number] -= 1
        return tuple(devices[index] for index in sorted(taken))

    def devices_within_quotas(self, cluster: Cluster) -> tuple[str, ...]:
        """Return as many allowed devices as the quotas leave, for strategies that do not choose among them.

        Raises:
            PlanError: as `allowed_devices`.
        """
        allowed = tuple(cluster.device_by_name[name] for name in self.allowed_devices(cluster))
        return tuple(device.name for device in (self._under_quotas(allowed) if self.quotas else allowed))

    def broken_by_devices(self, cluster: Cluster, devices: tuple[str, ...]) -> list[str]:
        """Return which of the demands on devices a set of devices breaks."""
        used = [cluster.device_by_name[name] for name in devices]
        broken = [f"{device.name} is left out" for device in used if {device.name, device.site} & set(self.leave_out)]
        names = {device.name for device in used} | {device.site for device in used}
        broken += [f"{name} is not used" for name in self.keep if name not in names]
        counts = ((quota, sum(quota.covers(device) for device in used)) for quota in self.quotas)
        return broken + [f"{n} {quota.kind} used, the quota is {quota.count}" for quota, n in counts if n > quota.count]


class Evaluation(Record):
    """What a plan would do, on the scale that all strategies share: the event simulator's."""

    step_s: float
    samples_per_s: float
    usd_per_step: float | None
    """None where a device has no price."""
    joules_per_sample: float
    bubble_ratio: float
    """Mean over the devices in use."""
    peak_bytes: Mapping[str, int]
    """By device."""
    over_memory: tuple[str, ...]
    """Devices that it does not fit on."""

    @property
    def fits(self) -> bool:
        """Whether every device can hold its part."""
        return not self.over_memory

    def value(self, objective: Objective) -> float:
        """Return what the objective wants to be small; infinite where it is not known."""
        match objective:
            case Objective.THROUGHPUT:
                return self.step_s
            case Objective.COST:
                return float("inf") if self.usd_per_step is None else self.usd_per_step
            case Objective.ENERGY:
                return self.joules_per_sample

    def broken(self, constraints: Constraints) -> list[str]:
        """Return which limits on time and money it breaks, with the numbers."""
        usd_per_hour = None if self.usd_per_step is None else self.usd_per_step * 3600 / self.step_s
        broken = []
        if constraints.min_samples_per_s is not None and self.samples_per_s < constraints.min_samples_per_s:
            broken.append(f"{self.samples_per_s:.4g} samples/s, at least {constraints.min_samples_per_s:g} wanted")
        for what, got, most in (
            ("s per step", self.step_s, constraints.max_step_s),
            ("USD per step", self.usd_per_step, constraints.max_usd_per_step),
            ("USD per hour", usd_per_hour, constraints.max_usd_per_hour),
        ):
            if most is not None and (got is None or got > most):
                broken.append(f"{'unknown' if got is None else f'{got:.4g}'} {what}, at most {most:g} wanted")
        return broken


Evaluate = Callable[[Plan], Evaluation]
Evaluated = tuple[Plan, Evaluation]


class PlanRequest(Record):
    """Everything that a strategy may look at."""

    profile: Profile
    job: JobSpec
    objective: Objective = Objective.THROUGHPUT
    constraints: Constraints = Constraints()
    restriction: Restriction = Restriction.NONE
    """Only `auto` knows others than none."""
    evaluate: Evaluate
    """Simulates a plan; strategies that a paper describes without a simulator do not call it."""

    def __post_init__(self) -> None:
        refusal = division_refusal(self.job.optimizer)
        if refusal and self.constraints.tensor_parallel is TensorParallel.ANY:
            raise PlanError(f"{refusal}; leave out --tensor-parallel any, or take another optimizer")

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """The devices that may be used, in the cluster's order."""
        return self.constraints.allowed_devices(self.profile.cluster)

    @property
    def divides_updates(self) -> bool:
        """Whether replicas of a stage may divide state."""
        return self.constraints.divided_updates and not division_refusal(self.job.optimizer)

    @cached_property
    def dividing(self) -> frozenset[str]:
        """The devices that may divide tensors with others of their host."""
        if division_refusal(self.job.optimizer) or not any(unit.tensor_sums for unit in self.profile.graph.units):
            return frozenset()
        cluster, by_host = self.profile.cluster, dict[str, list[str]]()
        for name in self.devices:
            by_host.setdefault(cluster.device_by_name[name].host, []).append(name)
        may = (
            names
            for names in by_host.values()
            if len(names) > 1 and self.constraints.tensor_parallel.allows(cluster, names)
        )
        return frozenset(name for names in may for name in names)

    @cached_property
    def devices_within_quotas(self) -> tuple[str, ...]:
        """As many of them as the quotas leave, for strategies that do not choose among them."""
        return self.constraints.devices_within_quotas(self.profile.cluster)


class Proposal(Record):
    """A plan that a strategy proposes."""

    plan: Plan
    own_estimate_s: float | None
    """Seconds per step by the strategy's own cost model; None where it has none."""
    reasons: tuple[str, ...] = ()


Strategy = Callable[[PlanRequest], tuple[Proposal, ...]]
"""Returns proposals, its best first; all are simulated and the best of them is the strategy's answer.

Raises:
    InfeasiblePlanError: nothing that the strategy can express fits; the closest misses are in the message.
"""
