"""How good the schedules are: `benchmarks/schedules.py [--cases 500] [--seed 1] [--json] [--plot FILE.png]`.

Simulates all schedules on a grid of cases (`schedule_cases.py`: 2 to 8 stages, 4 to 64 micro-batches, stages and links
up to eight times as slow as others, latency up to four stage times; half of them with the papers' devices and links)
and compares

- without a memory limit, the pipeline's seconds with the lower bound (`spantrain.sim.bounds`), for each schedule;
- with the memory that `1f1b` takes (on each device as many samples in flight, so as many bytes of activations),
  `critical-path` with the best of `1f1b`, `zb-h1` and `zb`: with the same micro-batches, and where it chooses them;
  beside it how much less any order at all could take with the same micro-batches, and what the three could gain if
  they were given the best of equal finer micro-batches;
- on small cases (2 to 4 stages, 2 to 6 micro-batches; no limit, and the memory of `1f1b` and one micro-batch more)
  `critical-path` with the best order of all, by branch and bound (`--small`).

Nothing is emulated or measured: this is the event simulator with made-up seconds and with the analytic law of the
papers' devices. Everything follows from the seed. matplotlib is needed for `--plot` only.
"""

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from schedule_cases import NOMINAL, Case, cases, made_up_case, with_limits
from spantrain.core.plan import Plan
from spantrain.core.span import equal_spans
from spantrain.schedule.layout import check_limits
from spantrain.schedule.registry import schedule_names
from spantrain.sim.bounds import pipeline_bound_s
from spantrain.sim.engine import SimulationOptions, SimulationResult, simulate
from spantrain.sim.search.model import model_of
from spantrain.sim.search.search import SearchEffort, simulated_s, taper, with_hints
from spantrain_studies.exact_orders import shortest
from worker_pool import follow_parent

OTHERS = ("1f1b", "zb-h1", "zb")
PLAIN = "critical-path, plain rule"
EFFORT = SearchEffort(max_actions=30_000, max_runs=100)
"""A fifth of what a plan gets, so that hundreds of cases take minutes."""
MEAN_TO_BOUND, MEAN_WHERE_MATTERS, WORST_SMALL = 1.015, 0.92, 1.03


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What came of a case."""

    name: str
    of_devices: bool
    network_matters: bool
    bound_s: float
    seconds: dict[str, float]
    """By schedule, without a memory limit."""
    limited_bound_s: float
    """That no order can beat with the memory of `1f1b` and these micro-batches."""
    limited_s: dict[str, float]
    """By schedule, with the memory of `1f1b`."""
    chosen_s: float
    """`critical-path` with the memory of `1f1b`, where it chooses the micro-batches."""
    others_recut_s: float
    """The best of the others with that memory and the best of equal finer micro-batches."""
    peak_to_limit: float
    """Bytes of activations in flight over the limit, the most of any device, of both runs of `critical-path`."""

    @property
    def best_other_s(self) -> float:
        """The best of `1f1b`, `zb-h1` and `zb` with the memory of `1f1b`."""
        return min(self.limited_s[name] for name in OTHERS)


def measure(case: Case) -> Entry:
    """Simulate a case under all schedules."""
    run = _Runner(case)
    free = {name: run(case.plan, name).pipeline_s for name in schedule_names()}
    free[PLAIN] = free["critical-path"]
    free["critical-path"] = run(with_hints(case.plan, case.costs, effort=EFFORT), "critical-path").pipeline_s
    held = run(case.plan, "1f1b").peak_in_flight
    limits = [[held[replica.devices[0]] for replica in stage.replicas] for stage in case.plan.stages]
    limited = with_limits(case.plan, limits)
    within = {name: run(limited, name).pipeline_s for name in schedule_names()}
    same = run(with_hints(limited, case.costs, effort=EFFORT), "critical-path")
    within["critical-path"] = same.pipeline_s
    chosen = run(taper(limited, case.costs, effort=EFFORT), "critical-path")
    peaks = [result.peak_in_flight[device] / held[device] for result in (same, chosen) for device in held]
    return Entry(
        name=case.name,
        of_devices=case.of_devices,
        network_matters=case.network_matters,
        bound_s=pipeline_bound_s(case.plan, case.costs),
        seconds=free,
        limited_bound_s=pipeline_bound_s(limited, case.costs),
        limited_s=within,
        chosen_s=chosen.pipeline_s,
        others_recut_s=min(run(plan, name).pipeline_s for plan in _recut(limited) for name in OTHERS),
        peak_to_limit=max(peaks),
    )


@dataclass(frozen=True)
class _Runner:
    case: Case

    def __call__(self, plan: Plan, schedule: str) -> SimulationResult:
        return simulate(
            replace(plan, schedule=schedule), self.case.costs, steps=1, options=SimulationOptions(trace=False)
        )


def _recut(plan: Plan) -> list[Plan]:
    """Return the plan as it is, and with micro-batches of a half and a quarter, where it can run."""
    size = max(span.size for span in plan.stages[0].micro_batches)
    found = [plan]
    for finer in sorted({max(1, size // part) for part in (2, 4)} - {size}):
        spans = equal_spans(plan.global_batch, finer)
        finer_plan = replace(plan, stages=tuple(replace(stage, micro_batches=spans) for stage in plan.stages))
        if not check_limits(finer_plan):
            found.append(finer_plan)
    return found


def small_cases(count: int, seed: int) -> dict[str, float]:
    """Compare `critical-path` with the best of all orders where that can be proven."""
    chance = random.Random(seed)
    own, plain, unproven = [], [], 0
    while len(own) + unproven < count:
        case = made_up_case(chance, most_stages=4, micro_batches=chance.randint(2, 6))
        stages = len(case.plan.stages)
        rows = [[(stages - stage + 1) * NOMINAL] for stage in range(stages)]
        plan = case.plan if len(own) % 2 else with_limits(case.plan, rows)
        own_s = simulated_s(with_hints(plan, case.costs), case.costs)
        least_s = pipeline_bound_s(plan, case.costs)
        best = shortest(model_of(plan, case.costs), beat_s=own_s, enough_s=least_s)
        if not best.proven:
            unproven += 1
            continue
        own.append(own_s / best.seconds)
        plain.append(simulated_s(plan, case.costs) / best.seconds)
    return {
        "cases": len(own),
        "unproven": unproven,
        "mean": statistics.fmean(own),
        "worst": max(own),
        "plain_mean": statistics.fmean(plain),
        "plain_worst": max(plain),
    }


def summary(entries: Sequence[Entry]) -> dict[str, object]:
    """Return means and worst cases."""
    mattering = [entry for entry in entries if entry.network_matters]

    def figures(ratio: Callable[[Entry], float], of: Sequence[Entry] = entries) -> dict[str, float]:
        values = [ratio(entry) for entry in of]
        return {"mean": statistics.fmean(values), "worst": max(values)} if values else {}

    names = [*schedule_names(), PLAIN]
    return {
        "cases": len(entries),
        "of_devices": sum(entry.of_devices for entry in entries),
        "network_matters": len(mattering),
        "over_bound": {name: figures(lambda e, name=name: e.seconds[name] / e.bound_s) for name in names},
        "over_bound_made_up": {
            name: figures(lambda e, name=name: e.seconds[name] / e.bound_s, [e for e in entries if not e.of_devices])
            for name in names
        },
        "memory_of_1f1b": {
            name: {"all": figures(ratio), "where_network_matters": figures(ratio, mattering)}
            for name, ratio in _LIMITED.items()
        },
        "peak_to_limit": max(entry.peak_to_limit for entry in entries),
    }


_LIMITED: dict[str, Callable[[Entry], float]] = {
    "critical-path, same micro-batches": lambda e: e.limited_s["critical-path"] / e.best_other_s,
    "lower bound, same micro-batches": lambda e: e.limited_bound_s / e.best_other_s,
    "critical-path, chosen micro-batches": lambda e: e.chosen_s / e.best_other_s,
    "critical-path, chosen, others cut finer": lambda e: e.chosen_s / e.others_recut_s,
    "compact, same micro-batches": lambda e: e.limited_s["compact"] / e.best_other_s,
}
"""Seconds with the memory of 1f1b over those of the best of 1f1b, zb-h1 and zb."""


def show_small(found: dict[str, float]) -> bool:
    """Print how near to the best order small cases are; return whether it is near enough."""
    print(
        f"\n{found['cases']} small cases, over the best order of all: critical-path mean {found['mean']:.4f}, worst "
        f"{found['worst']:.4f}; its plain rule {found['plain_mean']:.4f}, {found['plain_worst']:.4f}; "
        f"best order not proven in {found['unproven']}"
    )
    return _target("critical-path over the best order of small cases, worst", found["worst"], WORST_SMALL)


def show(found: dict[str, object], entries: Sequence[Entry]) -> bool:
    """Print the tables; return whether all targets are met."""
    print(
        f"{found['cases']} cases, {found['of_devices']} of the papers' devices; "
        f"latency or transfers matter in {found['network_matters']}"
    )
    print("\nno memory limit: seconds over the lower bound           mean   worst    made up: mean   worst")
    over, made_up = found["over_bound"], found["over_bound_made_up"]
    for name in sorted(over, key=lambda name: over[name]["mean"]):
        row, part = over[name], made_up[name]
        print(f"  {name:52} {row['mean']:7.4f} {row['worst']:7.3f} {part['mean']:16.4f} {part['worst']:7.3f}")
    print("\nmemory of 1f1b: seconds over the best of 1f1b, zb-h1, zb  mean   worst    network matters: mean   worst")
    for name, row in found["memory_of_1f1b"].items():
        some = row["where_network_matters"]
        print(
            f"  {name:52} {row['all']['mean']:7.4f} {row['all']['worst']:7.3f}"
            f" {some['mean']:24.4f} {some['worst']:7.3f}"
        )
    within = found["memory_of_1f1b"]
    best = within["critical-path, chosen micro-batches"]
    slowest = max(
        within[name]["all"]["worst"] for name in within if name.endswith("same micro-batches") and "crit" in name
    )
    held = [
        _target("critical-path over the bound, mean", over["critical-path"]["mean"], MEAN_TO_BOUND),
        _target("with the memory of 1f1b, worst, same micro-batches", slowest, 1 + 1e-9),
        _target("with the memory of 1f1b, worst, chosen micro-batches", best["all"]["worst"], 1 + 1e-9),
        _target(
            "with the memory of 1f1b, mean where the network matters",
            best["where_network_matters"]["mean"],
            MEAN_WHERE_MATTERS,
        ),
        _target("peak bytes of activations over the limit", found["peak_to_limit"], 1.0),
    ]
    print("\nfarthest from the bound without a limit:")
    for entry in sorted(entries, key=lambda e: -e.seconds["critical-path"] / e.bound_s)[:5]:
        print(f"  {entry.seconds['critical-path'] / entry.bound_s:.3f}  {entry.name}")
    return all(held)


def _target(what: str, value: float, most: float) -> bool:
    print(f"{what}: {value:.4f}, at most {most:.4g}: {'holds' if value <= most else 'MISSED'}")
    return value <= most


def plot(entries: Sequence[Entry], path: Path) -> None:
    """Draw what part of the cases has at most which ratio."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    share = [(k + 1) / len(entries) for k in range(len(entries))]
    for name in [*schedule_names(), PLAIN]:
        left.plot(sorted(entry.seconds[name] / entry.bound_s for entry in entries), share, label=name)
    left.set(
        xlabel="seconds over the lower bound", ylabel="part of the cases", title="no memory limit", xlim=(0.99, 2.5)
    )
    for name, ratio in _LIMITED.items():
        right.plot(sorted(map(ratio, entries)), share, label=name)
    right.set(xlabel="seconds over the best of 1f1b, zb-h1, zb", title="memory of 1f1b", xlim=(0.3, 1.1))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Simulate, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--small", type=int, default=100, help="small cases to compare with the best of all orders")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one object instead of the tables")
    parser.add_argument("--plot", type=Path, help="write a picture there")
    options = parser.parse_args()
    begun_s = time.monotonic()
    with multiprocessing.Pool(options.processes, initializer=follow_parent, initargs=(10,)) as pool:
        entries = []
        for entry in pool.imap(measure, cases(options.cases, options.seed)):
            entries.append(entry)
            if len(entries) % 25 == 0:
                print(f"{len(entries)} cases, {time.monotonic() - begun_s:.0f} s", file=sys.stderr, flush=True)
    found = summary(entries)
    small = small_cases(options.small, options.seed)
    if options.plot:
        plot(entries, options.plot)
    if options.json:
        print(json.dumps({**found, "small": small, "entries": [asdict(entry) for entry in entries]}, indent=1))
        return
    held = show(found, entries) and show_small(small)
    print(f"\nseed {options.seed}, {time.monotonic() - begun_s:.0f} s with {options.processes} processes")
    if not held:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
