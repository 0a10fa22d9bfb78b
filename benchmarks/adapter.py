"""What following the network gains: four stages on four sites, links cut by 40 to 60 % for half of a run, and others.

    python benchmarks/adapter.py [--live] [--models gpt2-tiny,resnet-tiny,gpt2-small,resnet-101] [--steps 30]
                                 [--networks 0.6,0.5,0.4,square,random-walk,diurnal,burst]

As in SpanTrain's figure 12a: one device on each of four sites. A network that is a number is that part of the bandwidth
between them for half of the run; others are those of `--network-trace`. Compared are, apart: the paper's pipeline
(`compact`, equal micro-batches) in micro-batches of 8 and in those that are fastest on calm links (tuned), the same in
our order (`critical-path`), in our order and in micro-batches of unlike sizes (ours), and ours with `auto`; besides,
the paper's adapter on its tuned pipeline, and `auto` where it may round slow cuts.

The best static choice is the best for just this network, known before: of all schedules in equal micro-batches of 1 to
16 samples, and of our plans made for calm links and for links that all give 70, 60, 50, 40 or 30 %; without those that
another one equals on each such network.

Simulated, unless --live is given: data sheets and a described network; the policies, monitors and adapters are those of
the runtime, but that `auto` plans nothing anew. With --live plans train on the testbed, one after the other. Emulated
there: devices' time (the computation is real) and the network (real TCP; a router shapes rate and delay). Bound: the
seconds that no order of work can beat with our plan's cuts and micro-batches, and exact messages, on the slow links;
`auto` may cut micro-batches finer.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from statistics import fmean

import adapter_live
from adapter_case import METHODS, SIZES, Case, Method, Size
from results import line_plot, save
from spantrain.adaptation.boundary import AutoSettings
from spantrain.adaptation.registry import make_boundary
from spantrain.app.adaptation.adapt import ProfileForecast
from spantrain.config.traces.network_traces import network_trace
from spantrain.core.action import Direction
from spantrain.core.plan import Plan
from spantrain.core.span import Span
from spantrain.core.speed import SpeedTrace
from spantrain.planner.engine.predict import costs_of
from spantrain.schedule.registry import schedule_names
from spantrain.sim.adaptive import simulate_adapting
from spantrain.sim.costs import StepCosts
from spantrain.sim.engine import SimulationOptions, simulate

_BEGIN, _END = 0.25, 0.85
"""From when to when links are slow, as parts of our run on calm links: half of the time that it takes then, or so."""
_LEVELS = (1.0, 0.7, 0.6, 0.5, 0.4, 0.3)
"""What links give in the networks that static plans are chosen for."""
_ALIKE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came of one method on one network."""

    model: str
    network: str
    method: str
    static: bool
    """Whether it is one of the static choices."""
    calm_s: float
    slow_s: float
    """Of the steps that are wholly on slow links; where links do not give one rate for a while, of all steps."""
    run_s: float
    """Of all steps."""
    after_s: float
    """Of the third step behind the recovery."""
    bound_s: float | None
    changes: tuple[str, ...] = ()
    """Of plan, with their reasons."""
    steps: tuple[tuple[float, float], ...] = ()
    """When each began, and its seconds; kept of those that the picture shows."""


def main() -> None:
    """Run the cases, print and write the tables."""
    options = _options()
    if options.live:
        models = options.models or "gpt2-tiny,resnet-tiny"
        adapter_live.show(models.split(","), options.networks or "0.6,0.4", options.steps or 18, options.seeds)
        return
    models = (options.models or "gpt2-tiny,resnet-tiny,gpt2-small,resnet-101").split(",")
    networks = (options.networks or "0.6,0.5,0.4,square,random-walk,diurnal,burst").split(",")
    rows: list[Row] = []
    with ProcessPoolExecutor(max_workers=len(models)) as pool:
        for found in pool.map(_of_model, models, [networks] * len(models), [options.steps or 30] * len(models)):
            rows.extend(found)
            print("\n".join(_tables(found)), flush=True)
    shown = [row for row in rows if (row.network, row.model) == (networks[0], models[0]) and not row.static]
    plot = line_plot(
        {row.method: row.steps for row in shown},
        title=f"simulated: {models[0]}, links at {networks[0]} for a while",
        across="seconds",
        up="seconds a step",
    )
    kept = [asdict(row if row in shown else replace(row, steps=())) for row in rows]
    save("adapter_simulated", _tables(rows), {"emulated": __doc__, "rows": kept}, plot)


def _of_model(model: str, networks: Sequence[str], steps: int) -> list[Row]:
    case = Case(model, Size())
    statics = _static_choices(case)
    return [row for network in networks for row in _on_network(case, network, steps, statics)]


def _static_choices(case: Case) -> dict[str, Plan]:
    """Return the plans that are best on some network whose links all give the same, each with its name."""
    plans = {
        f"{schedule}, micro-batches of {size}": case.equal(schedule, size)
        for schedule in schedule_names()
        for size in SIZES
    }
    plans |= {f"ours for links at {left:.0%}": case.ours_for(left) for left in _LEVELS}
    times = {name: [case.step_s(plan, left) for left in _LEVELS] for name, plan in plans.items()}
    names = list(plans)
    return {
        name: plans[name]
        for place, name in enumerate(names)
        if not any(_is_better(times[other], times[name], sooner=names.index(other) < place) for other in names)
    }


def _is_better(times: Sequence[float], others: Sequence[float], *, sooner: bool) -> bool:
    """Whether a plan is as fast everywhere, and faster somewhere or named sooner."""
    if any(own > other + _ALIKE for own, other in zip(times, others, strict=True)):
        return False
    return sooner or any(own < other - _ALIKE for own, other in zip(times, others, strict=True))


def used_links(plan: Plan, costs: StepCosts) -> set[str]:
    """Return the names of the links that a step's samples go over."""
    routes = simulate(plan, costs, steps=1, options=SimulationOptions(trace=False)).link_bytes
    found: set[str] = set()
    for stage, (here, there) in enumerate(zip(plan.stages, plan.stages[1:], strict=False)):
        for a, b in product((one.devices[0] for one in here.replicas), (one.devices[0] for one in there.replicas)):
            if (a, b) in routes:
                found |= set(costs.transfer(a, b, Direction.FORWARD, stage, Span(0, 1)).links)
            if (b, a) in routes:
                found |= set(costs.transfer(b, a, Direction.BACKWARD, stage + 1, Span(0, 1)).links)
    return found


def _on_network(case: Case, network: str, steps: int, statics: Mapping[str, Plan]) -> Iterator[Row]:
    calm_s = case.calm_s()
    total_s = steps * calm_s
    links = used_links(case.ours, costs_of(case.ours, case.profile))
    between = (0.0, float("inf"))
    if network.replace(".", "").isdigit():
        between = (_BEGIN * total_s, _END * total_s)
        speeds = dict.fromkeys(links, SpeedTrace(changes=((between[0], float(network)), (between[1], 1.0))))
    else:
        traces = network_trace(network).on(case.profile.cluster, total_s)
        speeds = {link: trace for link, trace in traces.items() if link in links}
    for method in METHODS:
        if speeds and (not method.allowed or between[0]):
            yield _row(case, network, method, case.plan(method), speeds, between, steps)
    for name, plan in statics.items():
        yield _row(case, network, Method(name=name, adapter="off", plan=""), plan, speeds, between, steps)


def _row(
    case: Case,
    network: str,
    method: Method,
    plan: Plan,
    speeds: Mapping[str, SpeedTrace],
    between: tuple[float, float],
    steps: int,
) -> Row:
    forecast = ProfileForecast(plan, case.profile, "adamw")
    done = simulate_adapting(
        plan,
        lambda candidate: costs_of(candidate, case.profile),
        steps=steps,
        link_speed=speeds,
        boundary=make_boundary(method.adapter, plan, forecast, AutoSettings(allowed=method.allowed)),
        local=method.adapter,
        move_s=forecast.move_s,
    )
    begin_s, end_s = between
    slow = [step.step_s for step in done if begin_s <= step.begun_s and step.begun_s + step.step_s <= end_s]
    after = [step.step_s for step in done if step.begun_s >= end_s] or [done[-1].step_s]
    static = not method.plan
    return Row(
        model=case.model,
        network=network,
        method=method.name,
        static=static,
        calm_s=case.step_s(plan, 1.0),
        slow_s=fmean(slow),
        run_s=(done[-1].begun_s + done[-1].step_s) / steps,
        after_s=after[min(2, len(after) - 1)],
        bound_s=case.bound_s(float(network)) if begin_s else None,
        changes=tuple(f"step {step.step}: {step.reason}" for step in done if step.reason),
        steps=() if static else tuple((step.begun_s, step.step_s) for step in done),
    )


def _tables(rows: Sequence[Row]) -> list[str]:
    lines = []
    for model in dict.fromkeys(row.model for row in rows):
        found = [row for row in rows if row.model == model]
        by_network = {
            network: [row for row in found if row.network == network]
            for network in dict.fromkeys(row.network for row in found)
        }
        lines += _table_of_seconds(model, by_network) + _table_of_gains(by_network) + _table_of_runs(by_network)
    return lines


def _table_of_seconds(model: str, by_network: Mapping[str, Sequence[Row]]) -> list[str]:
    ran = {row.method for rows in by_network.values() for row in rows}
    names = [method.name for method in METHODS if method.name in ran]
    lines = [
        f"{model} (simulated): seconds of a step on slow links; with traces, of all steps",
        f"{'':32} {'calm':>7} " + " ".join(f"{network:>11}" for network in by_network),
    ]
    for name in names:
        own = {network: next((row for row in rows if row.method == name), None) for network, rows in by_network.items()}
        calm_s = next(row.calm_s for row in own.values() if row is not None)
        seconds = " ".join(f"{row.slow_s:11.3f}" if row else f"{'':11}" for row in own.values())
        lines.append(f"{name:32} {calm_s:7.3f} {seconds}")
    best = (min(row.slow_s for row in rows if row.static) for rows in by_network.values())
    lines.append(f"{'best static choice':32} {'':7} " + " ".join(f"{seconds:11.3f}" for seconds in best))
    bounds = (rows[0].bound_s for rows in by_network.values())
    told = " ".join(f"{bound:11.3f}" if bound else f"{'':11}" for bound in bounds)
    return [*lines, f"{'bound, our micro-batches':32} {'':7} {told}".rstrip(), ""]


def _table_of_gains(by_network: Mapping[str, Sequence[Row]]) -> list[str]:
    """Return what each thing gains on slow links, one after the other."""
    lines = [
        f"{'gained by':12} {'micro-batches':>13} {'order':>7} {'unlike sizes':>12} {'adapter':>8} | "
        f"{'auto over tuned':>15} {'over paper adapter':>18} | {'after s':>7} changes"
    ]
    for network, rows in by_network.items():
        untuned, tuned, paper, ordered, ours, auto = [row for row in rows if not row.static][:6]
        pairs = ((untuned, tuned), (tuned, ordered), (ordered, ours), (ours, auto), (tuned, auto), (paper, auto))
        gains = [f"{before.slow_s / after.slow_s:.2f}x" for before, after in pairs]
        lines.append(
            f"{network:12} {gains[0]:>13} {gains[1]:>7} {gains[2]:>12} {gains[3]:>8} | {gains[4]:>15} {gains[5]:>18} | "
            f"{auto.after_s:7.3f} {len(auto.changes)}"
        )
    return [*lines, ""]


def _table_of_runs(by_network: Mapping[str, Sequence[Row]]) -> list[str]:
    """Return the seconds of whole runs, beside the best static choice for each."""
    lines = [f"{'whole runs':12} {'ours, off':>9} {'auto':>7} {'best static':>11} {'auto takes':>10} of it, which is"]
    for network, rows in by_network.items():
        by_name = {row.method: row for row in rows}
        best = min((row for row in rows if row.static), key=lambda row: row.run_s)
        auto = by_name["ours, auto"]
        lines.append(
            f"{network:12} {by_name['ours, off'].run_s:9.3f} {auto.run_s:7.3f} {best.run_s:11.3f} "
            f"{auto.run_s / best.run_s:10.1%} {best.method}"
        )
    return [*lines, ""]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--models", default="", help="as if not given: four of them, live two")
    parser.add_argument("--networks", default="", help="what links give for a while, or a trace; live: numbers only")
    parser.add_argument("--steps", type=int, default=0, help="as if not given: 30, live 18")
    parser.add_argument("--seeds", type=int, default=1, help="live: runs of each method for each rate, one seed each")
    return parser.parse_args()


if __name__ == "__main__":
    main()
