"""Our plans beside another planner's: `benchmarks/planner_reference.py DIR [--only NAME] [--json] [--out FOLDER]`.

DIR holds figures that others measured (profiles, prices, networks) and, in sailor_results.json, for many clusters and
objectives the plans that their planner found, and some of a plain search. For each, the search behind
`spantrain plan --restrict megatron` makes a plan from the same figures; all are run through the same simulator, the one
that `spantrain validate DIR` compares with measured runs. Each case runs in a process of its own, for its memory.

Theirs are taken only where they are valid: they fit, they use no more devices than there are. Memory is counted in two
ways, ours and that planner's own, and ours keep to both. Nothing is emulated; nothing is measured but the search.
"""

import argparse
import json
import math
import multiprocessing
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spantrain.errors import SpanTrainError
from spantrain.planner.request import Constraints, Objective
from spantrain.planner.strategies.pools.costs import PoolPlan, PoolReplica, PoolStage
from spantrain_studies.reference.folder import read_reference
from spantrain_studies.reference.plan import ReferenceFigures, ReferencePlanner
from spantrain_studies.reference.platform import load_platform
from spantrain_studies.reference.types import ReferencePlan
from spantrain_studies.reference.validate import PLATFORM
from worker_pool import follow_parent

GLOBAL_BATCH = {"OPT-350": 1024, "GPT-Neo-2.7": 2048}
"""In that planner's configuration files."""
EQUAL = 5e-4
THEIRS, PLAIN = "theirs", "plain"
PLAIN_ZONE = "us-central1-a"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is to be planned, and the plans of others, by their names."""

    name: str
    model: str
    cheapest: bool
    most_usd: float | None
    least_per_s: float | None
    available: dict[tuple[str, str], int]
    others: dict[str, dict[str, Any]]


def cases(folder: Path) -> list[Case]:
    """Return all cases of a folder, those of the plain search that no case of the planner has included."""
    found = json.loads((folder / "sailor_results.json").read_text(encoding="utf-8"))
    rows = [_case(run) for run in found["planner_runs"]]
    for number, row in enumerate(found["plain_search_headroom"]["rows"]):
        plain = _plain_case(number, row)
        alike = [case for case in rows if _asks_the_same(case, plain)]
        for case in alike:
            case.others[PLAIN] = row
        if not alike:
            rows.append(plain)
    return rows


def _case(run: dict[str, Any]) -> Case:
    chosen = run.get("best_valid_in_returned_list_by_simulator") or run.get("chosen")
    return Case(
        name=run["scenario"],
        model=run["model"],
        cheapest=run["objective"] != "throughput",
        most_usd=run["max_usd_per_iteration"],
        least_per_s=run["min_iterations_per_s"],
        available={tuple(key.split("_", 1)): count for key, count in run["available_gpus"].items()},
        others={} if chosen is None else {THEIRS: chosen["plan"]},
    )


def _plain_case(number: int, row: dict[str, Any]) -> Case:
    return Case(
        name=f"plain_{number}",
        model=row["model"],
        cheapest=row["objective"] == "cost",
        most_usd=1.5 if row["simulated_usd_per_iteration"] < 1.5 and row["model"] == "GPT-Neo-2.7" else None,
        least_per_s=row["min_it_per_s"],
        available={(kind, PLAIN_ZONE): row[kind] for kind in ("A100-40", "V100-16") if row[kind]},
        others={PLAIN: row},
    )


def _asks_the_same(a: Case, b: Case) -> bool:
    keys = ("model", "cheapest", "most_usd", "least_per_s", "available")
    return all(getattr(a, key) == getattr(b, key) for key in keys)


def their_plan(plan: dict[str, Any], planner: ReferencePlanner, global_batch: int) -> PoolPlan:
    """Return a plan of others in our terms: either form that the folder has."""
    pools = {(pool.kind, pool.site): index for index, pool in enumerate(planner.pools)}
    stages = []
    if "stages" in plan:
        for stage in plan["stages"]:
            runs: list[tuple[PoolReplica, int]] = []
            for name, count in stage["replicas"].items():
                kind, _, rest = name.partition("@")
                zone, _, degree = rest.partition(":tp")
                runs.append((PoolReplica(pools[kind, zone], int(degree)), count))
            first, last = stage["layers"]
            stages.append(PoolStage(units=range(first, last + 1), runs=tuple(runs)))
    else:
        for kind, degree, first, end in plan["stages_[gpu,tp,first_layer,end_layer)"]:
            runs = [(PoolReplica(pools[kind, PLAIN_ZONE], degree), plan["dp"])]
            stages.append(PoolStage(units=range(first, end), runs=tuple(runs)))
    width = stages[0].width
    return PoolPlan(
        micro_batch=plan["mbs"], micro_batches=-(-global_batch // (plan["mbs"] * width)), stages=tuple(stages)
    )


def written(plan: ReferencePlan) -> dict[str, Any]:
    """Return a plan with all that another framework needs to know of it."""
    return {
        "model": plan.model,
        "schedule": "1f1b",
        "global_batch": plan.global_batch,
        "micro_batch": plan.micro_batch,
        "micro_batches": plan.micro_batches,
        "pp": len(plan.stages),
        "dp": plan.dp_degree,
        "stages": [
            {
                "layers": [stage.layers.start, stage.layers.stop - 1],
                "replicas": [
                    {"gpu": replica.kind, "zone": replica.zone, "tp": replica.tp_degree, "host": host}
                    for replica, host in zip(stage.replicas, hosts, strict=True)
                ],
            }
            for stage, hosts in zip(plan.stages, plan.hosts, strict=True)
        ],
    }


def judged(folder: Path, case: Case) -> dict[str, Any]:
    """Plan a case, and simulate all plans of it."""
    batch = GLOBAL_BATCH[case.model]
    reference, platform = read_reference(folder), load_platform(PLATFORM)
    planner = ReferencePlanner(reference, platform, model=case.model, global_batch=batch, available=case.available)
    limits = Constraints(
        max_usd_per_step=case.most_usd, max_step_s=None if case.least_per_s is None else 1 / case.least_per_s
    )
    row: dict[str, Any] = {"name": case.name, "model": case.model, "devices": sum(case.available.values())}
    try:
        ours = planner.plan(Objective.COST if case.cheapest else Objective.THROUGHPUT, limits)
    except SpanTrainError as error:
        return row | {"ours": None, "reason": str(error), "verdict": "no plan", "others": {}}
    row |= {"ours": shown(ours, case), "search_s": ours.search_s, "written": written(ours.plan)}
    row["peak_rss_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row["others"] = {
        name: shown(planner.figures(their_plan(plan, planner, batch)), case) for name, plan in case.others.items()
    }
    values = [other["value"] for other in row["others"].values() if other["valid"] and other["keeps_limits"]]
    row["ratio"] = min(values) / row["ours"]["value"] if values else None
    row["verdict"] = _verdict(row["ratio"])
    return row


def shown(figures: ReferenceFigures, case: Case) -> dict[str, Any]:
    """Return the figures of a plan that are compared."""
    keeps = case.most_usd is None or figures.usd_per_step <= case.most_usd
    keeps = keeps and (case.least_per_s is None or 1 / figures.step_s >= case.least_per_s)
    return {
        "iterations_per_s": 1 / figures.step_s,
        "usd_per_iteration": figures.usd_per_step,
        "value": figures.usd_per_step if case.cheapest else figures.step_s,
        "valid": figures.valid,
        "keeps_limits": keeps,
        "over_memory": list(figures.over_memory),
        "over_counted": list(figures.over_counted),
        "over_available": list(figures.over_available),
        "peak_bytes": figures.peak_bytes,
        "counted_bytes": list(figures.counted_bytes),
        "devices": dict(figures.devices),
        "stages": len(figures.plan.stages),
        "dp": figures.plan.dp_degree,
        "micro_batch": figures.plan.micro_batch,
    }


def _verdict(ratio: float | None) -> str:
    if ratio is None:
        return "alone"
    if abs(ratio - 1) <= EQUAL:
        return "equal"
    return "won" if ratio > 1 else "LOST"


def _line(row: dict[str, Any]) -> str:
    if row["ours"] is None:
        return f"{row['name']:26} {row['devices']:5}  no plan: {row['reason']}"
    parts = [f"{row['name']:26} {row['devices']:5} {row['search_s']:7.2f} {row['peak_rss_bytes'] / 1e6:6.0f}"]
    for figures in (row["ours"], row["others"].get(THEIRS), row["others"].get(PLAIN)):
        if figures is None:
            parts.append(f"{'-':>8} {'-':>7}  ")
        else:
            mark = "!" if not figures["valid"] else "$" if not figures["keeps_limits"] else " "
            parts.append(f"{figures['iterations_per_s']:8.4f} {figures['usd_per_iteration']:7.3f}{mark} ")
    ratio = "" if row["ratio"] is None else f"{row['ratio']:6.3f}"
    return " ".join((*parts, f"{ratio:6} {row['verdict']}"))


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--only", default="", metavar="NAME", help="cases whose name holds this")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--out", type=Path, default=None, metavar="FOLDER", help="write the plans there")
    options = parser.parse_args()
    if not (options.folder / "sailor_results.json").is_file():
        print(f"{options.folder}: holds no sailor_results.json; nothing to compare with", file=sys.stderr)
        return 2
    if not options.json:
        print(
            f"{'case':26} {'dev.':>5} {'search s':>7} {'MB':>5} {'ours it/s':>8} {'USD':>6}   {'theirs':>8} {'USD':>6} "
            f"  {'plain':>8} {'USD':>6}    ratio (! does not fit or uses too many devices, $ breaks a limit)"
        )
    found = []
    for case in cases(options.folder):
        if options.only in case.name:
            with multiprocessing.get_context("spawn").Pool(1, initializer=follow_parent) as pool:
                found.append(pool.apply(judged, (options.folder, case)))
            if not options.json:
                print(_line(found[-1]), flush=True)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        for row in found:
            if row["ours"] is not None:
                text = json.dumps(row["written"], indent=1)
                (options.out / f"{row['name']}.json").write_text(text + "\n", encoding="utf-8")
    counts = {verdict: sum(row["verdict"] == verdict for row in found) for verdict in ("won", "equal", "LOST", "alone")}
    worst = min((row["ratio"] for row in found if row.get("ratio") is not None), default=math.nan)
    if options.json:
        print(json.dumps({"cases": found, "summary": counts | {"worst_ratio": worst}}, indent=1))
    else:
        print(f"{', '.join(f'{count} {verdict}' for verdict, count in counts.items())}; worst ratio {worst:.4f}")
    return 0 if not counts["LOST"] and all(row["ours"] and row["ours"]["valid"] for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
