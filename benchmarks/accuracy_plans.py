"""The plans of simulator_accuracy.py: cases in short, the clusters that they run on, and plans made of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from spantrain.config.kinds import load_kinds
from spantrain.core.action import Op
from spantrain.core.cluster import Cluster, Device, Host, Link, Site
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.profile import UnitTiming
from spantrain.core.span import equal_spans
from spantrain.core.units import ModelSpec, UnitGraph
from spantrain.cost.analytic import AnalyticLaw
from spantrain.schedule.layout import CutLayout, minimum_in_flight

BUSY_S = 1.5
"""Seconds that the busiest device of each plan computes in a step."""
_SLOW = 1e-3
"""Of a kind's speed: slow enough for the host's fixed cost per operation, which no speed changes, to be little."""
KINDS = {"nx": "xavier-nx", "tx": "tx2", "nano": "jetson-nano"}
DEVICES = ("nx0", "nx1", "tx0", "tx1", "nano0", "nano1")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan in short."""

    model: str
    schedule: str
    stages: tuple[tuple[str, ...], ...]
    shares: tuple[tuple[float, ...], ...] = ()
    """Of each stage's replicas; empty: even."""
    batch: int = 16
    sizes: tuple[int, ...] = (2,)
    """Micro-batch of all stages, or of each."""
    room: float = 1.0
    """In-flight limits, as a part of the batch; at least what the pipeline needs."""
    hints: bool = False
    """Whether the plan comes with an order that was searched for it."""
    far: bool = False
    """Whether the devices are at three sites, with delay between them; else all are at one."""


def one(*names: str) -> tuple[tuple[str, ...], ...]:
    """Return a pipeline of single devices."""
    return tuple((name,) for name in names)


CASES = (
    Case(model="gpt2-tiny", schedule="1f1b", stages=one("nx0", "tx0")),
    Case(model="gpt2-tiny", schedule="gpipe", stages=one("nx0", "nx1", "tx0")),
    Case(model="gpt2-tiny", schedule="critical-path", stages=one("tx0", "nx0", "nano0", "tx1")),
    Case(
        model="gpt2-tiny",
        schedule="compact",
        stages=(("nx0", "tx0"), ("nano0", "nano1")),
        shares=((2, 1), (1, 1)),
        batch=24,
        sizes=(6,),
    ),
    Case(model="gpt2-tiny", schedule="zb-h1", stages=one("nx0", "tx0", "nano0"), far=True),
    Case(model="gpt2-tiny", schedule="zb", stages=(("nx0",), ("tx0", "tx1")), far=True),
    Case(
        model="gpt2-tiny",
        schedule="critical-path",
        stages=one("nx0", "nx1", "tx0", "tx1", "nano0", "nano1"),
        hints=True,
        far=True,
        batch=20,
    ),
    Case(model="bert-small-tiny", schedule="1f1b-asteroid", stages=one("nx0", "nx1", "tx0", "nano0")),
    Case(model="bert-small-tiny", schedule="zb", stages=one("nx0", "tx0", "nx1"), room=0.5),
    Case(
        model="bert-small-tiny",
        schedule="critical-path",
        stages=(("nx0",), ("tx0", "nano0"), ("nx1",)),
        shares=((1,), (2, 1), (1,)),
        sizes=(2, 6, 4),
        batch=24,
        far=True,
    ),
    Case(model="bert-small-tiny", schedule="1f1b", stages=one("tx0", "nx0"), far=True, room=0.4),
    Case(
        model="bert-small-tiny",
        schedule="gpipe",
        stages=(("nx0", "nx1"), ("tx0", "tx1"), ("nano0", "nano1")),
        far=True,
        batch=24,
        sizes=(4,),
    ),
    Case(model="resnet-tiny", schedule="compact", stages=one("nx0", "tx0", "nano0"), far=True),
    Case(model="resnet-tiny", schedule="critical-path", stages=one("nx0", "nano0"), sizes=(2, 4)),
    Case(
        model="resnet-tiny",
        schedule="zb-h1",
        stages=(("nx0", "nano0"), ("tx0",), ("tx1",)),
        shares=((3, 1), (1,), (1,)),
        batch=32,
        sizes=(4,),
    ),
    Case(model="resnet-tiny", schedule="1f1b-asteroid", stages=one("tx0", "tx1", "nx0", "nx1", "nano0"), far=True),
    Case(model="efficientnet-tiny", schedule="1f1b", stages=one("nx0", "tx0", "tx1")),
    Case(
        model="efficientnet-tiny",
        schedule="critical-path",
        stages=(("nx0", "tx0"), ("nx1", "tx1")),
        shares=((2, 1), (2, 1)),
        batch=24,
        sizes=(3,),
        hints=True,
        far=True,
    ),
    Case(model="efficientnet-tiny", schedule="compact", stages=one("nano0", "nx0", "tx0", "nx1"), room=0.5, far=True),
    Case(model="efficientnet-tiny", schedule="zb", stages=one("nx0", "nx1")),
)


def cluster_of(*, far: bool) -> Cluster:
    """Return six devices on six hosts of one site, or of three sites with links of unlike delay and bandwidth."""
    kinds = load_kinds()
    site_of = {name: f"site-{name[:-1]}" if far else "here" for name in DEVICES}
    sites = tuple(dict.fromkeys(site_of.values()))
    slow = {("site-nx", "site-tx"): (10e-3, 50e6), ("site-nx", "site-nano"): (30e-3, 20e6)}
    links = []
    for a, b in combinations(sites, 2):
        latency_s, bits_per_s = slow.get((a, b), (20e-3, 30e6))
        links += [
            Link(source=x, target=y, latency_s=latency_s, bandwidth_bytes_per_s=bits_per_s / 8)
            for x, y in ((a, b), (b, a))
        ]
    return Cluster(
        name="accuracy-far" if far else "accuracy-near",
        kinds=tuple(kinds[kind] for kind in KINDS.values()),
        sites=tuple(
            Site(
                name=site,
                hosts=tuple(name for name in DEVICES if site_of[name] == site),
                bandwidth_bytes_per_s=1e9 / 8,
                latency_s=2e-4,
            )
            for site in sites
        ),
        hosts=tuple(Host(name=name, site=site_of[name], devices=(name,)) for name in DEVICES),
        devices=tuple(
            Device(
                name=name,
                kind=KINDS[name[:-1]],
                host=name,
                site=site_of[name],
                backend="emulated",
                memory_bytes=kinds[KINDS[name[:-1]]].memory_bytes,
            )
            for name in DEVICES
        ),
        links=tuple(links),
    )


def law_timings(cluster: Cluster, graph: UnitGraph, sizes: Sequence[int]) -> tuple[UnitTiming, ...]:
    """Return the seconds that emulated devices take, which are all that measuring them would show."""
    by_class = {unit.unit_class: unit for unit in graph.units}
    laws = [AnalyticLaw(kind=kind, speed=cluster.emulated_speed, dtype="float32") for kind in cluster.kinds]
    return tuple(
        UnitTiming(
            unit_class=name,
            kind=law.kind.name,
            dtype="float32",
            samples=samples,
            forward_s=law.seconds(unit, Op.FORWARD, samples),
            backward_input_s=law.seconds(unit, Op.BACKWARD_INPUT, samples),
            backward_weight_s=law.seconds(unit, Op.BACKWARD_WEIGHT, samples),
            source="analytic",
        )
        for name, unit in by_class.items()
        for law in laws
        for samples in sizes
    )


class PlanMaker:
    """Turns a case into a plan: cuts that even the stages out, and the speed at which they are busy for long enough."""

    def __init__(self, case: Case, cluster: Cluster, graph: UnitGraph, model: ModelSpec) -> None:
        self._case = case
        self._cluster = cluster
        self._graph = graph
        self._model = model
        self._sizes = case.sizes if len(case.sizes) > 1 else case.sizes * len(case.stages)
        self._shares = case.shares or tuple((1.0,) * len(names) for names in case.stages)

    def make(self, generation: int) -> Plan:
        """Return the plan."""
        units = len(self._graph.units)
        cuts = min(combinations(range(1, units), len(self._case.stages) - 1), key=self._busiest_s)
        speed = _SLOW * self._busiest_s(cuts) / BUSY_S
        plan = self._plan(cuts, replace(self._cluster, emulated_speed=speed), [self._case.batch] * len(self._sizes))
        needed = [max(row) for row in minimum_in_flight(CutLayout.of(plan))]
        room = round(self._case.room * self._case.batch)
        return replace(self._plan(cuts, plan.cluster, [max(room, least) for least in needed]), generation=generation)

    def _busiest_s(self, cuts: Sequence[int]) -> float:
        """Return the seconds a step that the busiest device computes at a slow speed, if the model is cut here."""
        edges = (0, *cuts, len(self._graph.units))
        worst_s = 0.0
        for index, (first, end) in enumerate(pairwise(edges)):
            shares = self._shares[index]
            for name, share in zip(self._case.stages[index], shares, strict=True):
                kind = self._cluster.kind_by_name[self._cluster.device_by_name[name].kind]
                law = AnalyticLaw(kind=kind, speed=_SLOW, dtype="float32")
                samples = max(1, round(self._sizes[index] * share / sum(shares)))
                units = self._graph.units[first:end]
                seconds = sum(law.seconds(unit, op, samples) for unit in units for op in (Op.FORWARD, Op.BACKWARD))
                worst_s = max(worst_s, seconds * self._case.batch / self._sizes[index])
        return worst_s

    def _plan(self, cuts: Sequence[int], cluster: Cluster, limits: Sequence[int]) -> Plan:
        edges = (0, *cuts, len(self._graph.units))
        stages = tuple(
            Stage(
                first_unit=first,
                end_unit=end,
                replicas=tuple(
                    Replica(devices=(name,), sample_share=share, in_flight_limit=limits[index])
                    for name, share in zip(self._case.stages[index], self._shares[index], strict=True)
                ),
                micro_batches=equal_spans(self._case.batch, self._sizes[index]),
            )
            for index, (first, end) in enumerate(pairwise(edges))
        )
        return Plan(
            cluster=cluster,
            model=self._model,
            global_batch=self._case.batch,
            dtype="float32",
            stages=stages,
            schedule=self._case.schedule,
        )
