"""What following the network gains: four stages on four sites, links cut by 40 to 60 % for the middle of a run.

    python benchmarks/adapter.py [--live] [--models gpt2-tiny,resnet-tiny] [--left 0.6,0.5,0.4] [--steps 30]

As in SpanTrain's figure 12a: one device on each of four sites, bandwidth between them cut for a while. Compared are the
paper's pipeline (`compact`, equal micro-batches) without an adapter and with the paper's, and ours (`critical-path`,
micro-batches and order as planned) without, with `auto`, and with `auto` where it may round slow cuts.

Simulated, unless --live is given: data sheets and a described network; the policies, monitors and adapters are those of
the runtime. With --live the same plans train on the testbed, one after the other. Emulated there: devices' time (the
computation is real) and the network (real TCP; a router shapes rate and delay). Bound: seconds that no order of work
can beat with these plans' cuts and exact messages on the slow links.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, pairwise, permutations
from pathlib import Path
from statistics import fmean

import adapter_live
from results import line_plot, save
from spantrain.app.adapt import ProfileForecast
from spantrain.app.describe import described_profile
from spantrain.app.predict import costs_of
from spantrain.config.cluster_file import parse_cluster
from spantrain.core.action import Action, Op
from spantrain.core.cluster import Cluster
from spantrain.core.plan import Plan, Replica, Stage, WireFormat
from spantrain.core.profile import Profile
from spantrain.core.spans import Span, equal_spans
from spantrain.core.speed import SpeedTrace
from spantrain.models.catalog import resolve_model
from spantrain.policy.adapter.boundary import AutoSettings
from spantrain.policy.adapter.choice import make_boundary
from spantrain.policy.adapter.state import LinkState
from spantrain.sim.adaptive import simulate_adapting, used_links
from spantrain.sim.bound import step_bound_s
from spantrain.sim.search_spans import taper
from spantrain.sim.slowed import SlowedCosts

SITES = ("cloud", "lab", "office", "home")
GLOBAL_BATCH, MICRO_BATCH = 64, 8
RATIO = 0.8
"""Of the slowest stage's work on a sample that its busiest cut takes in one direction when the network is calm."""
STEP_S = 2.0
_TURNS = 3


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to train."""

    name: str
    adapter: str
    ours: bool
    allowed: tuple[WireFormat, ...] = ()


METHODS = (
    Method(name="paper's pipeline, off", adapter="off", ours=False),
    Method(name="paper's adapter", adapter="paper", ours=False),
    Method(name="ours, off", adapter="off", ours=True),
    Method(name="ours, auto", adapter="auto", ours=True),
    Method(name="ours, auto, may send bfloat16", adapter="auto", ours=True, allowed=(WireFormat.BFLOAT16,)),
    Method(name="ours, auto, may send int8", adapter="auto", ours=True, allowed=(WireFormat.INT8,)),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came of one method on one network."""

    model: str
    left: float
    method: str
    simulated: bool
    calm_s: float
    slow_s: float
    after_s: float
    """Of the third step behind the recovery."""
    bound_s: float
    changes: tuple[str, ...]
    """Of plan, with their reasons."""
    steps: tuple[tuple[float, float], ...]
    """When each began, and its seconds."""


def main() -> None:
    """Run the cases, print and write the table."""
    options = _options()
    rows: list[Row] = []
    for model in options.models.split(","):
        case = Case(model, STEP_S)
        for left in map(float, options.left.split(",")):
            found = _live(case, left, options) if options.live else _simulated(case, left, options.steps)
            rows.extend(found)
            print("\n".join(_table([row for row in rows if (row.model, row.left) == (model, left)])), flush=True)
    shown = [row for row in rows if row.left == rows[0].left and row.model == rows[0].model]
    kind = "live" if options.live else "simulated"
    plot = line_plot(
        {row.method: row.steps for row in shown},
        title=f"{kind}: {shown[0].model}, links at {shown[0].left:.0%} for a while",
        across="seconds",
        up="seconds a step",
    )
    save(f"adapter_{kind}", _table(rows), {"emulated": __doc__, "rows": [asdict(row) for row in rows]}, plot)


class Case:
    """A model on four sites whose network is as fast, beside its devices, as `RATIO` says."""

    def __init__(self, model: str, step_s: float) -> None:
        spec = resolve_model(model)
        trial = described_profile(_cluster(1.0, 1e9), spec)
        speed = _slowest_s(_cut(trial), trial) * GLOBAL_BATCH / step_s
        sample_s, rate = step_s / GLOBAL_BATCH, 1e9
        for _ in range(_TURNS):  # the cuts follow the network, and the network the cuts
            profile = described_profile(_cluster(speed, rate), spec)
            plan = _cut(profile)
            rate = _widest_bytes(plan, profile) / (RATIO * sample_s)
        self.model = model
        self.profile = described_profile(_cluster(speed, rate), spec)
        self.paper = replace(plan, cluster=self.profile.cluster, schedule="compact")
        ours = replace(self.paper, schedule="critical-path")
        self.ours = taper(ours, costs_of(ours, self.profile))

    def plan(self, method: Method) -> Plan:
        """Return what a method begins with."""
        return self.ours if method.ours else self.paper

    def bound_s(self, left: float) -> float:
        """Return the seconds that no order of work can beat on slow links."""
        names = [stage.replicas[0].devices[0] for stage in self.ours.stages]
        slow = LinkState(speeds=dict.fromkeys(permutations(names, 2), left))
        costs = costs_of(self.ours, self.profile)
        return step_bound_s(self.ours, SlowedCosts(costs, slow, len(names)))


def _simulated(case: Case, left: float, steps: int) -> Iterator[Row]:
    calm_s = simulate_adapting(case.ours, lambda plan: costs_of(plan, case.profile), steps=1, link_speed={})[0].step_s
    begin_s, end_s = steps / 4 * calm_s, steps * 3 / 5 * calm_s
    for method in METHODS:
        plan = case.plan(method)
        forecast = ProfileForecast(plan, case.profile, "adamw")
        links = used_links(plan, costs_of(plan, case.profile))
        done = simulate_adapting(
            plan,
            lambda candidate: costs_of(candidate, case.profile),
            steps=steps,
            link_speed=dict.fromkeys(links, SpeedTrace(changes=((begin_s, left), (end_s, 1.0)))),
            boundary=make_boundary(method.adapter, plan, forecast, AutoSettings(allowed=method.allowed)),
            local=method.adapter,
            move_s=forecast.move_s,
        )
        times = tuple((step.begun_s, step.step_s) for step in done)
        reasons = tuple(f"step {step.step}: {step.reason}" for step in done if step.reason)
        yield _row(case, left, method, times, (begin_s, end_s), reasons, simulated=True)


def _live(case: Case, left: float, options: argparse.Namespace) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        runs = adapter_live.Runs(case.profile, Path(folder), options.steps, left)
        for method in METHODS:
            plan = case.plan(method)
            times, between, reasons, _ = runs.run(plan, method.name, method.adapter, method.allowed, seed=0)
            yield _row(case, left, method, times, between, reasons, simulated=False)


def _row(
    case: Case,
    left: float,
    method: Method,
    times: Sequence[tuple[float, float]],
    between: tuple[float, float],
    reasons: tuple[str, ...],
    *,
    simulated: bool,
) -> Row:
    begin_s, end_s = between
    calm = [seconds for at_s, seconds in times if at_s + seconds <= begin_s]
    slow = [seconds for at_s, seconds in times if begin_s <= at_s and at_s + seconds <= end_s]
    after = [seconds for at_s, seconds in times if at_s >= end_s]
    return Row(
        model=case.model,
        left=left,
        method=method.name,
        simulated=simulated,
        calm_s=fmean(calm[1:]),
        slow_s=fmean(slow),
        after_s=after[min(2, len(after) - 1)],
        bound_s=case.bound_s(left),
        changes=reasons,
        steps=tuple(times),
    )


def _table(rows: Sequence[Row]) -> list[str]:
    lines = []
    cases: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        cases.setdefault((row.model, row.left), []).append(row)
    for (model, left), found in cases.items():
        paper, adapter = found[0].slow_s, found[1].slow_s
        kind = "simulated" if found[0].simulated else "live, on the testbed"
        lines += [
            f"{model}, links at {left:.0%} ({kind}); bound with exact messages {found[0].bound_s:.3f} s",
            f"{'':32} {'calm s':>8} {'slow s':>8} {'over off':>9} {'over paper':>11} {'after s':>8} changes",
        ]
        lines += [
            f"{row.method:32} {row.calm_s:8.3f} {row.slow_s:8.3f} {paper / row.slow_s:8.2f}x "
            f"{adapter / row.slow_s:10.2f}x {row.after_s:8.3f} {len(row.changes)}"
            for row in found
        ]
        lines.append("")
    return lines


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


def _cut(profile: Profile) -> Plan:
    """Return a plan of four stages whose slowest stage or cut is as fast as can be."""
    units = len(profile.graph.units)
    names = [device.name for device in profile.cluster.devices]
    rate = profile.cluster.links[0].bandwidth_bytes_per_s
    edges = ((0, *inner, units) for inner in combinations(range(1, units), len(names) - 1))
    plans = (_plan(profile, names, row) for row in edges)
    return min(plans, key=lambda plan: max(_slowest_s(plan, profile), _widest_bytes(plan, profile) / rate))


def _widest_bytes(plan: Plan, profile: Profile) -> int:
    """Return the bytes of a sample on the widest cut."""
    cuts = (profile.graph.units[stage.end_unit - 1] for stage in plan.stages[:-1])
    return max(WireFormat.NATIVE.forward_bytes(cut) for cut in cuts)


def _plan(profile: Profile, names: Sequence[str], edges: Sequence[int]) -> Plan:
    stages = tuple(
        Stage(
            first_unit=first,
            end_unit=end,
            replicas=(Replica(devices=(name,), sample_share=1.0, in_flight_limit=GLOBAL_BATCH),),
            micro_batches=equal_spans(GLOBAL_BATCH, MICRO_BATCH),
        )
        for name, (first, end) in zip(names, pairwise(edges), strict=True)
    )
    return Plan(
        cluster=profile.cluster,
        model=profile.model,
        global_batch=GLOBAL_BATCH,
        dtype="float32",
        stages=stages,
        schedule="critical-path",
    )


def _slowest_s(plan: Plan, profile: Profile) -> float:
    """Return the seconds of the slowest stage's work on a sample."""
    costs = costs_of(plan, profile)
    whole = Span(0, MICRO_BATCH)
    ops = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
    return max(
        sum(costs.action_s(stage.replicas[0].devices[0], Action(number, op, whole)) for op in ops) / MICRO_BATCH
        for number, stage in enumerate(plan.stages)
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--models", default="gpt2-tiny,resnet-tiny")
    parser.add_argument("--left", default="0.6,0.5,0.4")
    parser.add_argument("--steps", type=int, default=30)
    return parser.parse_args()


if __name__ == "__main__":
    main()
