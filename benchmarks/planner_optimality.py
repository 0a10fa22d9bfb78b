"""How far from the true optimum the planner is: `benchmarks/planner_optimality.py [--cases 300]`.

Random small cases: 2 to 6 devices of unequal kinds in 1 to 3 sites, 4 to 10 units of random cost and size, links of
10 Mbit/s to 10 Gbit/s and 0 to 50 ms, memory tight in a third of them, that of hosts ample. On each, what the planner
answers by default is compared with `exhaustive` (every plan that a proven bound does not rule out, simulated), and with
what it answers for every other strategy; all by the same simulator. The order of work is searched for the best plan of
each, and of `auto` for up to sixteen more (docs/planner.md). A ratio over 1 is slower than the
optimum; answers may be under 1, since they have orders and micro-batches that `exhaustive` does not know.

Like is compared with like: plans that divide gradients (`zero2`, `fsdp`) with those of `auto` where that is allowed,
all others with those of `auto` as it is. The optimum is that of `auto` as it is.

Nothing is emulated; all times come from the simulator. Processes run at low priority.
"""

import argparse
import contextlib
import json
import math
import multiprocessing
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from planner_cases import random_profile
from spantrain.core.profile import Profile
from spantrain.errors import SpanTrainError
from spantrain.planner.dividing import TensorParallel
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.request import Constraints, JobSpec, PlanRequest
from spantrain.planner.strategies.registry import strategies
from spantrain_studies.planners.exhaustive import exhaustive
from worker_pool import follow_parent

MEAN_BOUND, WORST_BOUND, SAME = 1.01, 1.05, 1 + 1e-9


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """What came out for one case."""

    seed: int
    devices: int
    sites: int
    units: int
    tight: bool
    optimum_s: float
    auto_s: float
    auto_search_s: float
    exhaustive_search_s: float
    devices_used: int
    auto_divided_s: float
    """Of `auto` where state and tensors may be divided."""
    others_s: dict[str, float] = field(default_factory=dict)
    """Of the best plan of each strategy that training can do."""
    others_divided_s: dict[str, float] = field(default_factory=dict)
    """Of the best plan of each strategy that divides state or tensors."""

    @property
    def ratio(self) -> float:
        """Time of `auto` over that of the optimum."""
        return self.auto_s / self.optimum_s

    @property
    def beaten_by(self) -> list[str]:
        """Strategies whose plan is faster than that of `auto`."""
        whole = [name for name, seconds in self.others_s.items() if seconds * SAME < self.auto_s]
        return whole + [name for name, seconds in self.others_divided_s.items() if seconds * SAME < self.auto_divided_s]


def run_case(seed: int) -> CaseResult | str:
    """Plan one case by every strategy; a string says why it was left out."""
    profile, tight = random_profile(seed)
    job = JobSpec(global_batch=random.Random(seed + 1).choice((8, 12, 16)))
    evaluate = Evaluator(profile, job)
    request = PlanRequest(profile=profile, job=job, evaluate=evaluate)
    started_s = time.process_time()
    try:
        found = exhaustive(request)
    except SpanTrainError as error:
        return f"case {seed}: {error}"
    between_s = time.process_time()
    best = make_plan(profile, job, PlanOptions())
    ended_s = time.process_time()
    free = Constraints(sharded_state=True, tensor_parallel=TensorParallel.ANY)
    others, others_divided = others_of(profile, job, evaluate)
    return CaseResult(
        seed=seed,
        devices=len(profile.cluster.devices),
        sites=len(profile.cluster.sites),
        units=len(profile.graph.units),
        tight=tight,
        optimum_s=evaluate(found[0].plan).step_s,
        auto_s=evaluate(best.plan).step_s,
        auto_search_s=ended_s - between_s,
        exhaustive_search_s=between_s - started_s,
        devices_used=len(best.plan.devices),
        auto_divided_s=evaluate(make_plan(profile, job, PlanOptions(constraints=free)).plan).step_s,
        others_s=others,
        others_divided_s=others_divided,
    )


def others_of(profile: Profile, job: JobSpec, evaluate: Evaluator) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of each other strategy's answer: what `auto` may do unasked, and what it may not."""
    whole: dict[str, float] = {}
    divided: dict[str, float] = {}
    for name in strategies():
        if name not in ("auto", "exhaustive"):
            with contextlib.suppress(SpanTrainError):
                plan = make_plan(profile, job, PlanOptions(strategies=(name,))).plan
                unasked = any(stage.divides_gradients for stage in plan.stages)
                (divided if unasked else whole)[name] = evaluate(plan).step_s
    return whole, divided


def report(results: list[CaseResult], skipped: list[str]) -> bool:
    """Print the table; return whether the targets are met."""
    ratios = [result.ratio for result in results]
    names = sorted({name for result in results for name in (*result.others_s, *result.others_divided_s)})
    print(f"{len(results)} cases, {len(skipped)} left out (nothing fits)")
    print(f"{'group':22} {'cases':>5} {'mean':>8} {'median':>8} {'worst':>8} {'auto s':>8} {'optimum s':>9}")
    groups = [("all", results)]
    groups += [(f"{n} devices", [r for r in results if r.devices == n]) for n in range(2, 7)]
    groups += [("memory tight", [r for r in results if r.tight]), ("memory ample", [r for r in results if not r.tight])]
    for name, rows in groups:
        if rows:
            own = [row.ratio for row in rows]
            print(
                f"{name:22} {len(rows):5} {statistics.fmean(own):8.4f} {statistics.median(own):8.4f} {max(own):8.4f} "
                f"{statistics.fmean(row.auto_search_s for row in rows):8.3f} "
                f"{statistics.fmean(row.exhaustive_search_s for row in rows):9.2f}"
            )
    print("\nother strategies, over the optimum; on how many cases they found a plan, and beat auto")
    for name in names:
        rows = [row for row in results if name in row.others_s or name in row.others_divided_s]
        own = [
            min(row.others_s.get(name, math.inf), row.others_divided_s.get(name, math.inf)) / row.optimum_s
            for row in rows
        ]
        beats = [row.seed for row in rows if name in row.beaten_by]
        print(
            f"{name:22} {len(rows):5} {statistics.fmean(own):8.4f} {statistics.median(own):8.4f} {max(own):8.4f}"
            f"   beats auto on {len(beats)} {beats[:5] or ''}"
        )
    mean, worst = statistics.fmean(ratios), max(ratios)
    beaten = sum(bool(row.beaten_by) for row in results)
    met = mean <= MEAN_BOUND and worst <= WORST_BOUND and not beaten
    print(f"\nmean {mean:.4f} (bound {MEAN_BOUND}), worst {worst:.4f} (bound {WORST_BOUND}), beaten on {beaten} cases")
    print(f"worst cases: {[(row.seed, round(row.ratio, 4)) for row in sorted(results, key=lambda r: -r.ratio)[:8]]}")
    print("targets met" if met else "targets MISSED")
    return met


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    options = parser.parse_args()
    results: list[CaseResult] = []
    skipped: list[str] = []
    seeds = range(1000 * options.seed, 1000 * options.seed + options.cases)
    with multiprocessing.get_context("spawn").Pool(
        options.processes, initializer=follow_parent, initargs=(10,)
    ) as pool:
        for number, result in enumerate(pool.imap_unordered(run_case, seeds), start=1):
            if isinstance(result, str):
                skipped.append(result)
            else:
                results.append(result)
            if number % 10 == 0:
                worst = max((row.ratio for row in results), default=0.0)
                mean = statistics.fmean(row.ratio for row in results) if results else 0.0
                print(f"{number}/{len(seeds)} mean {mean:.4f} worst {worst:.4f}", file=sys.stderr)
    results.sort(key=lambda row: row.seed)
    met = report(results, skipped)
    if options.json:
        page = {"cases": [{**asdict(row), "ratio": row.ratio} for row in results], "skipped": skipped, "met": met}
        options.json.write_text(json.dumps(page, indent=1) + "\n", encoding="utf-8")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
