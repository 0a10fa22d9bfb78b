"""What following the network gains: four stages on four sites, links cut by 40 to 60 % for half of a run.

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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

import adapter_live
from adapter_case import METHODS, Case, Method, Size
from results import line_plot, save
from spantrain.app.adapt import ProfileForecast
from spantrain.app.predict import costs_of
from spantrain.core.speed import SpeedTrace
from spantrain.policy.adapter.boundary import AutoSettings
from spantrain.policy.adapter.choice import make_boundary
from spantrain.sim.adaptive import simulate_adapting, used_links

_BEGIN, _END = 0.25, 0.85
"""From when to when links are slow, as parts of our run on calm links: half of the time that it takes then, or so."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came of one method on one network."""

    model: str
    left: float
    method: str
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
    if options.live:
        adapter_live.show(options.models.split(","), options.left or "0.6,0.4", options.steps or 18, options.seeds)
        return
    rows: list[Row] = []
    for model in options.models.split(","):
        case = Case(model, Size())
        for left in map(float, (options.left or "0.6,0.5,0.4").split(",")):
            rows.extend(_simulated(case, left, options.steps or 30))
            print("\n".join(_table([row for row in rows if (row.model, row.left) == (model, left)])), flush=True)
    shown = [row for row in rows if row.left == rows[0].left and row.model == rows[0].model]
    plot = line_plot(
        {row.method: row.steps for row in shown},
        title=f"simulated: {shown[0].model}, links at {shown[0].left:.0%} for a while",
        across="seconds",
        up="seconds a step",
    )
    save("adapter_simulated", _table(rows), {"emulated": __doc__, "rows": [asdict(row) for row in rows]}, plot)


def _simulated(case: Case, left: float, steps: int) -> Iterator[Row]:
    calm_s = case.calm_s()
    begin_s, end_s = steps * _BEGIN * calm_s, steps * _END * calm_s
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
        yield _row(case, left, method, times, (begin_s, end_s), reasons)


def _row(
    case: Case,
    left: float,
    method: Method,
    times: Sequence[tuple[float, float]],
    between: tuple[float, float],
    reasons: tuple[str, ...],
) -> Row:
    begin_s, end_s = between
    calm = [seconds for at_s, seconds in times if at_s + seconds <= begin_s]
    slow = [seconds for at_s, seconds in times if begin_s <= at_s and at_s + seconds <= end_s]
    after = [seconds for at_s, seconds in times if at_s >= end_s]
    return Row(
        model=case.model,
        left=left,
        method=method.name,
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
        lines += [
            f"{model}, links at {left:.0%} (simulated); bound with exact messages {found[0].bound_s:.3f} s",
            f"{'':32} {'calm s':>8} {'slow s':>8} {'over off':>9} {'over paper':>11} {'after s':>8} changes",
        ]
        lines += [
            f"{row.method:32} {row.calm_s:8.3f} {row.slow_s:8.3f} {paper / row.slow_s:8.2f}x "
            f"{adapter / row.slow_s:10.2f}x {row.after_s:8.3f} {len(row.changes)}"
            for row in found
        ]
        lines.append("")
    return lines


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--models", default="gpt2-tiny,resnet-tiny")
    parser.add_argument("--left", default="", help="what links give; as if not given: 0.6,0.5,0.4, live 0.6,0.4")
    parser.add_argument("--steps", type=int, default=0, help="as if not given: 30, live 18")
    parser.add_argument("--seeds", type=int, default=1, help="live: runs of each method for each rate, one seed each")
    return parser.parse_args()


if __name__ == "__main__":
    main()
