"""The case of `adapter.py`, `adapter_live.py` and `adapter_calm.py`: four stages on four sites, links alike.

As in SpanTrain's figure 12a: one device on each of four sites. The network is as fast, beside its devices, as `RATIO`
says, so that it is no limit as it is, and one when it gives half.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, permutations

from spantrain.adaptation.network_state import LinkState
from spantrain.app.profiling.describe import described_profile
from spantrain.config.cluster_file import parse_cluster
from spantrain.core.action import SPLIT_OPS, Action
from spantrain.core.cluster import Cluster
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.profile import Profile, RuntimeCosts
from spantrain.core.span import Span, equal_spans
from spantrain.formats.registry import WireFormat
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.predict import costs_of
from spantrain.sim.adaptive import slowed_costs
from spantrain.sim.bounds import step_bound_s
from spantrain.sim.costs import StepCosts
from spantrain.sim.engine import simulate
from spantrain.sim.search.search import taper, with_hints

SITES = ("cloud", "lab", "office", "home")
RATIO = 0.8
"""Of the slowest stage's work on a sample that its busiest cut takes in one direction when the network is calm."""
SIZES = (1, 2, 4, 8, 16)
"""Samples of a micro-batch that are tried."""
_TURNS = 6


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to train."""

    name: str
    adapter: str
    plan: str
    """Of `Case.plans`."""
    allowed: tuple[WireFormat, ...] = ()


METHODS = (
    Method(name="micro-batches of 8, off", adapter="off", plan="untuned"),
    Method(name="tuned, off", adapter="off", plan="tuned"),
    Method(name="tuned, paper's adapter", adapter="paper", plan="tuned"),
    Method(name="tuned, our order, off", adapter="off", plan="ordered"),
    Method(name="ours, off", adapter="off", plan="ours"),
    Method(name="ours, auto", adapter="auto", plan="ours"),
    Method(name="ours, auto, may send bfloat16", adapter="auto", plan="ours", allowed=(WireFormat.BFLOAT16,)),
    Method(name="ours, auto, may send int8", adapter="auto", plan="ours", allowed=(WireFormat.INT8,)),
)
"""All but the last two send exact messages."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of a step."""

    samples: int = 64
    micro_batch: int = 8
    work_s: float = 2.0
    """Of the slowest stage on all samples, about."""


class Case:
    """A model on four sites, and the plans that are compared.

    `untuned` is the paper's pipeline in the micro-batches of `Size`, `tuned` in those that are fastest on calm links,
    `ordered` the same micro-batches in our order, `ours` in our order and in micro-batches of sizes of our own.
    """

    def __init__(self, model: str, size: Size) -> None:
        spec = resolve_model(model)
        self.size = size
        sample_s, speed, rate = size.work_s / size.samples, 1.0, 1e9
        for _ in range(_TURNS):  # the cuts follow devices and network, and those follow the cuts
            profile = described_profile(_cluster(speed, rate), spec)
            plan = self._cut(profile)
            speed *= _slowest_s(plan, profile, size) / sample_s
            rate = _widest_bytes(plan, profile) / (RATIO * sample_s)
        self.model = model
        self.profile = described_profile(_cluster(speed, rate), spec)
        self._paper = replace(plan, cluster=self.profile.cluster, schedule="compact")
        self._tune()

    def know(self, runtime: RuntimeCosts | None) -> None:
        """Count what the runtime itself takes, in all that is simulated and in our plan."""
        self.profile = replace(self.profile, runtime=runtime)
        self._tune()

    def _tune(self) -> None:
        tuned = min((self.equal("compact", samples) for samples in SIZES), key=lambda plan: self.step_s(plan, 1.0))
        self.plans = {
            "untuned": self._paper,
            "tuned": tuned,
            "ordered": with_hints(replace(tuned, schedule="critical-path"), self._costs(1.0)),
            "ours": self.ours_for(1.0),
        }

    def ours_for(self, left: float) -> Plan:
        """Return what our planner makes for links that all give so much."""
        return taper(replace(self._paper, schedule="critical-path"), self._costs(left))

    def equal(self, schedule: str, samples: int) -> Plan:
        """Return the plan with a schedule and micro-batches of so many samples."""
        spans = equal_spans(self.size.samples, samples)
        stages = tuple(replace(stage, micro_batches=spans) for stage in self._paper.stages)
        return replace(self._paper, schedule=schedule, stages=stages)

    def step_s(self, plan: Plan, left: float) -> float:
        """Return the seconds of a step while all links give so much."""
        return simulate(plan, self._costs(left), steps=1).step_s

    def _costs(self, left: float) -> StepCosts:
        costs = costs_of(self._paper, self.profile)
        names = self._paper.devices
        return slowed_costs(costs, LinkState(speeds=dict.fromkeys(permutations(names, 2), left)))

    @property
    def ours(self) -> Plan:
        """Our plan for calm links."""
        return self.plans["ours"]

    def plan(self, method: Method) -> Plan:
        """Return what a method begins with."""
        return self.plans[method.plan]

    def calm_s(self) -> float:
        """Return the seconds of a step of our plan on links as they are."""
        return self.step_s(self.ours, 1.0)

    def bound_s(self, left: float) -> float:
        """Return the seconds that no order of work can beat with our plan's cuts and micro-batches on slow links."""
        return step_bound_s(self.ours, self._costs(left))

    def _cut(self, profile: Profile) -> Plan:
        """Return a plan of four stages whose slowest stage or cut is as fast as can be."""
        units = len(profile.graph.units)
        names = [device.name for device in profile.cluster.devices]
        rate = profile.cluster.links[0].bandwidth_bytes_per_s
        edges = ((0, *inner, units) for inner in combinations(range(1, units), len(names) - 1))
        plans = (_plan(profile, names, row, self.size) for row in edges)
        return min(
            plans, key=lambda plan: max(_slowest_s(plan, profile, self.size), _widest_bytes(plan, profile) / rate)
        )


def _cluster(speed: float, bytes_per_s: float) -> Cluster:
    sites = "".join(
        f"  - name: {site}\n    network: {{bandwidth: 1 Gbit/s, latency: 0.2 ms}}\n"
        f"    hosts: [{{name: {site}, backend: emulated, devices: {{xavier-nx: 1}}}}]\n"
        for site in SITES
    )
    rate = f"{bytes_per_s * 8 / 1e3:.0f} kbit/s"
    links = "".join(
        f"  - {{between: [{a}, {b}], bandwidth: {rate}, latency: 10 ms}}\n"
        for number, a in enumerate(SITES)
        for b in SITES[number + 1 :]
    )
    text = f"name: four-sites\nemulated_speed: {speed:.6g}\nsites:\n{sites}links:\n{links}"
    return parse_cluster(text, source="this benchmark")


def _widest_bytes(plan: Plan, profile: Profile) -> int:
    """Return the bytes of a sample on the widest cut."""
    cuts = (profile.graph.units[stage.end_unit - 1] for stage in plan.stages[:-1])
    return max(cut.forward_bytes(WireFormat.NATIVE) for cut in cuts)


def _plan(profile: Profile, names: Sequence[str], edges: Sequence[int], size: Size) -> Plan:
    stages = tuple(
        Stage(
            first_unit=first,
            end_unit=end,
            replicas=(Replica(devices=(name,), sample_share=1.0, in_flight_limit=size.samples),),
            micro_batches=equal_spans(size.samples, size.micro_batch),
        )
        for name, (first, end) in zip(names, pairwise(edges), strict=True)
    )
    return Plan(
        cluster=profile.cluster,
        model=profile.model,
        global_batch=size.samples,
        dtype="float32",
        stages=stages,
        schedule="critical-path",
    )


def _slowest_s(plan: Plan, profile: Profile, size: Size) -> float:
    """Return the seconds of the slowest stage's work on a sample."""
    costs = costs_of(plan, profile)
    whole = Span(0, size.micro_batch)
    return max(
        sum(costs.action_s(stage.replicas[0].devices[0], Action(number, op, whole)) for op in SPLIT_OPS)
        / size.micro_batch
        for number, stage in enumerate(plan.stages)
    )
