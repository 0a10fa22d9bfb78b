"""Print what dividing tensors inside hosts brings the default plan, on random pools: without, as by default, anywhere.

python benchmarks/planner_dividing.py [--pools 40] [--save]

Pools have one to three sites with up to three hosts of one, two or four GPUs, joined by
NVLink, PCIe or by what nobody says. All seconds are the simulator's, by data sheets: nothing is measured.
"""

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass

import results
from spantrain.app.profiling.describe import described_profile
from spantrain.config.cluster_file import parse_cluster
from spantrain.errors import InfeasiblePlanError
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.dividing import TensorParallel
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.request import Constraints, JobSpec

SAME = 1.005
"""By how much a step may be longer with more choice."""
KINDS = ("a100", "v100", "h100", "rtx-4090")
MODELS = ("gpt2-medium", "gpt2-large", "gpt2-xl", "bert-base")


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A pool, and what is trained on it."""

    text: str
    """The cluster file."""
    model: str
    global_batch: int
    dtype: str


def drawn(seed: int) -> Drawn:
    """Return a random case."""
    draw = random.Random(seed)
    count, lines = draw.randint(1, 3), ["name: drawn", "sites:"]
    for site in range(count):
        rate = draw.choice([1, 10, 100])
        lines += [f"  - name: s{site}", f"    network: {{bandwidth: {rate} Gbit/s, latency: 0.1 ms}}", "    hosts:"]
        for host in range(draw.randint(1, 3)):
            kind, size = draw.choice(KINDS), draw.choice([1, 2, 4])
            inside = draw.choice(["", ", inside: nvlink", ", inside: nvlink", ", inside: pcie"])
            lines.append(f"      - {{name: s{site}h{host}, devices: {{{kind}: {size}}}{inside}}}")
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    for number, (a, b) in enumerate(pairs):
        rate, latency_ms = draw.choice([0.1, 1, 5]), draw.choice([1, 10])
        lines += ["links:"] * (not number)
        lines.append(f"  - {{between: [s{a}, s{b}], bandwidth: {rate} Gbit/s, latency: {latency_ms} ms}}")
    return Drawn(
        text="\n".join(lines) + "\n",
        model=draw.choice(MODELS),
        global_batch=draw.choice([4, 16, 64]),
        dtype=draw.choice(["bfloat16", "float32"]),
    )


def measure(seed: int) -> dict[str, float] | None:
    """Return the seconds of a step and of planning by what is allowed; None where nothing fits without dividing."""
    case, found = drawn(seed), dict[str, float]()
    cluster = parse_cluster(case.text, source=f"pool {seed}")
    profile = described_profile(cluster, resolve_model(case.model), dtype=case.dtype)
    job = JobSpec(global_batch=case.global_batch, optimizer="adamw", dtype=case.dtype)
    for allowed in (TensorParallel.NONE, TensorParallel.AUTO, TensorParallel.ANY):
        began_s = time.process_time()
        try:
            outcome = make_plan(profile, job, PlanOptions(constraints=Constraints(tensor_parallel=allowed)))
        except InfeasiblePlanError:
            return None
        found[f"{allowed} step_s"], found[f"{allowed} plan_s"] = outcome.step_s_predicted, time.process_time() - began_s
    return found


def main() -> int:
    """Print the table; return 1 if more choice has made a plan worse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pools", type=int, default=40)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    options = parser.parse_args()
    rows = [row for seed in range(options.pools) if (row := measure(seed)) is not None]
    table, worse = [f"{len(rows)} pools on which a plan fits, of {options.pools}"], 0
    for allowed in (TensorParallel.AUTO, TensorParallel.ANY):
        gains = [row[f"{TensorParallel.NONE} step_s"] / row[f"{allowed} step_s"] - 1 for row in rows]
        better, own = [gain for gain in gains if gain > SAME - 1], sum(gain < 1 / SAME - 1 for gain in gains)
        took = statistics.median(row[f"{allowed} plan_s"] / row[f"{TensorParallel.NONE} plan_s"] for row in rows)
        worse += own
        table.append(
            f"{allowed:<5} faster on {len(better):3}, by {min(better, default=0.0):.1%} to "
            f"{max(better, default=0.0):.1%}; "
            f"worse on {own} (at most 0 {'holds' if not own else 'missed'}); planning takes {took:.2f} times as long"
        )
    print("\n".join(table))
    if options.save:
        results.save("planner_dividing", table, {"results": rows})
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main())
