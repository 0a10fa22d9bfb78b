"""More is never worse: `benchmarks/planner_monotone.py [--pools 2000] [--from SEED] [--most-sites N] [--save]`.

Random pools of devices (1 to 4,096 of one to three kinds, as often few as many, in 1 to 200 sites, links of 50 Mbit/s
to 50 Gbit/s), a random model and global batch. Each is planned, changed in one way, and planned again: a device more, a
site more, twice the bandwidth between sites, twice the memory, twice the samples, int8 allowed between sites, a
strategy asked beside `auto`; or only the order of the sites in the cluster is another. Samples per second may not fall
by more than half of a per cent, and not change by more where only the order is another.

Profiles are made from data sheets and described networks (`cost.analytic`); nothing is emulated, all times come from
the simulator. A pool is its seed: the same number always gives the same pool and change.

All pools take about six hours of a core. With `--save` what has come out is kept as it comes, pools that are known are
not planned again, and each keeps the digest of the code that planned it; `--anew` plans those of older code again.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from made_from import digest_of
from planner_pools import Pool, cluster_of, random_pool
from results import FOLDER, save
from spantrain.app.profiling.describe import described_profile
from spantrain.errors import InfeasiblePlanError
from spantrain.formats.registry import WireFormat
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.request import Constraints, JobSpec
from worker_pool import workers

LEAST = 0.995
"""Samples per second afterwards over those before."""
MODELS = ("gpt2-small", "gpt2-medium", "resnet-101")
BESIDE = ("spantrain", "spantrain-dp", "eddl", "ddp", "1f1b")
NAME = "planner_monotone"
MOST_SITES = 200
EVERY = 20
"""Pools after which is kept what has come out, and a line says so."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is planned."""

    pool: Pool
    model: str
    global_batch: int
    options: PlanOptions = field(default_factory=PlanOptions)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What came of a pool before and after its change; 0 samples per second: nothing fits."""

    seed: int
    change: str
    devices: int
    sites: int
    model: str
    global_batch: int
    before_per_s: float
    after_per_s: float
    took_s: float
    """Processor seconds of both plans."""
    code: str
    """Digest of the code that planned it."""

    @property
    def ratio(self) -> float:
        """Samples per second afterwards over those before."""
        return self.after_per_s / self.before_per_s if self.before_per_s else 1.0

    @property
    def holds(self) -> bool:
        """Whether it is no worse, or the same where only an order is another."""
        return self.ratio >= LEAST and (self.change != "order" or self.ratio <= 1 / LEAST)


def question_of(seed: int, most_sites: int) -> Question:
    """Return the question of a seed."""
    rng = random.Random(seed + 1)
    return Question(
        pool=random_pool(seed, most_sites), model=rng.choice(MODELS), global_batch=rng.choice((32, 128, 512, 1000))
    )


def changes(question: Question, seed: int) -> Mapping[str, Question]:
    """Return the same with more, by what it has more of; and in another order."""
    rng, pool = random.Random(seed + 2), question.pool
    number = rng.randrange(len(pool.places))
    place = pool.places[number]
    kind = rng.choice(sorted(place.counts))
    grown = replace(place, counts={**place.counts, kind: place.counts[kind] + 1})
    order = tuple(rng.sample(range(len(pool.places)), len(pool.places)))
    int8 = Constraints(wire_formats=(WireFormat.NATIVE, WireFormat.INT8))
    pools = {
        "device": pool.with_place(number, grown),
        "site": replace(pool, places=(*pool.places, place)),
        "bandwidth": replace(pool, bandwidth_bytes_per_s=2 * pool.bandwidth_bytes_per_s),
        "memory": replace(pool, memory_ratio=2.0),
        "order": replace(pool, order=order),
    }
    return {name: replace(question, pool=other) for name, other in pools.items()} | {
        "samples": replace(question, global_batch=2 * question.global_batch),
        "format": replace(question, options=PlanOptions(constraints=int8)),
        "strategy": replace(question, options=PlanOptions(strategies=("auto", rng.choice(BESIDE)))),
    }


def samples_per_s(question: Question) -> float:
    """Return what the chosen plan does; 0 where nothing fits."""
    profile = described_profile(cluster_of(question.pool), resolve_model(question.model))
    try:
        outcome = make_plan(profile, JobSpec(global_batch=question.global_batch), question.options)
    except InfeasiblePlanError:
        return 0.0
    return outcome.samples_per_s_predicted


def compared(seed: int, most_sites: int, code: str) -> Compared:
    """Plan a pool before and after one change, which the seed chooses."""
    began_s = time.process_time()
    question = question_of(seed, most_sites)
    others = changes(question, seed)
    change = sorted(others)[seed % len(others)]
    before = samples_per_s(question)
    after = samples_per_s(others[change])
    return Compared(
        seed=seed,
        change=change,
        devices=question.pool.devices,
        sites=len(question.pool.places),
        model=question.model,
        global_batch=question.global_batch,
        before_per_s=before,
        after_per_s=after,
        took_s=time.process_time() - began_s,
        code=code,
    )


def table(found: Sequence[Compared], wanted: int, code: str) -> list[str]:
    """Return the lines by change, then the pools that do not hold, then what follows."""
    lines = [f"{'more of':10} {'pools':>6} {'worse':>6} {'least ratio':>11} {'mean ratio':>11} {'cpu s':>7}"]
    for name in sorted({one.change for one in found}):
        rows = [one for one in found if one.change == name]
        lines.append(
            f"{name:10} {len(rows):6} {sum(not one.holds for one in rows):6} {min(one.ratio for one in rows):11.4f} "
            f"{statistics.fmean(one.ratio for one in rows):11.4f} {statistics.fmean(one.took_s for one in rows):7.1f}"
        )
    lines += [_line(one) for one in found if not one.holds]
    older = sum(one.code != code for one in found)
    verdict = "more is never worse" if all(one.holds for one in found) else "MISSED"
    return [*lines, f"{len(found)} of {wanted} pools, {older} of them by older code: {verdict}"]


def _line(one: Compared) -> str:
    return (
        f"pool {one.seed}, {one.change}: {one.before_per_s:.4g} samples/s, then {one.after_per_s:.4g} "
        f"({one.ratio:.4f}); {one.devices} devices in {one.sites} sites, {one.model}, {one.global_batch} samples"
    )


def known() -> dict[int, Compared]:
    """Return what has come out before, by seed."""
    path = FOLDER / f"{NAME}.json"
    rows = json.loads(path.read_text())["pools"] if path.exists() else []
    return {row["seed"]: Compared(**row) for row in rows}


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pools", type=int, default=2000)
    parser.add_argument("--from", type=int, default=0, dest="first", metavar="SEED")
    parser.add_argument("--most-sites", type=int, default=MOST_SITES, metavar="N")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--save", action="store_true", help=f"keep what comes out in benchmarks/results/{NAME}.*")
    parser.add_argument("--anew", action="store_true", help="plan pools again that older code has planned")
    options = parser.parse_args()
    if options.save and options.most_sites != MOST_SITES:
        parser.error(
            f"--save keeps pools by their seeds, which are of up to {MOST_SITES} sites: leave --most-sites out"
        )
    code = digest_of(Path(__file__))
    found = {seed: one for seed, one in known().items() if one.code == code or not options.anew} if options.save else {}
    seeds = [seed for seed in range(options.first, options.first + options.pools) if seed not in found]

    def lines() -> list[str]:
        return table([found[seed] for seed in sorted(found)], len(found) + len(seeds) - done, code)

    done = 0
    with workers(options.processes) as pool:
        for job in as_completed([pool.submit(compared, seed, options.most_sites, code) for seed in seeds]):
            one = found[job.result().seed] = job.result()
            done += 1
            if not one.holds:
                print(_line(one), flush=True)
            if done % EVERY == 0 or done == len(seeds):
                print(f"{done} of {len(seeds)} pools, {sum(row.took_s for row in found.values()):.0f} s", flush=True)
                if options.save:
                    save(NAME, lines(), {"pools": [asdict(found[seed]) for seed in sorted(found)]})
    print("\n".join(lines()))
    return 0 if all(one.holds for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
