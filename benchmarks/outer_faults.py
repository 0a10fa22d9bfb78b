"""Kill a cluster, a shard and the master at every phase of a round, and cut a cluster off: who else notices it.

python benchmarks/outer_faults.py [--only cluster/push,shard,partition] [--keep rows.json] [--partition-s 60]
                                  [--no-network] [--quick]

Real: processes, signals (kill -9), TCP through the testbed's router, encryption, gradients, the files of master and
shards. Emulated: the clusters' seconds per step, and their links (40, 40, 20 and 10 Mbit/s). One run for all rows:
after each fault it goes on until all is well again. The whole takes seven minutes of a machine that does nothing else.

Rounds are short (twelve inner steps: 3 s of the fastest cluster, 15 s of the slowest) and the window lasts 1 s, since a
cluster that was started again comes back with a whole round of its own: 3.3 s of the bound. Of the phases, `training`
is with no layer of that cluster (or, for a shard and the master, of any) under way; `update` is between the end of a
window and the version, held open by stopping the other shard for a moment.

calm: nothing happens, for comparison.
longest step: of the survivors, between the fault and the recovery, between the ends of two inner steps, over their own
seconds of a step.
loaded: from the restart until the process says its first word: Python and torch are there.
joined: until the cluster has the newest version, or the master knows all shards (of a partition: knows the cluster).
back: until a push of the restarted cluster is in a version and that version is there; for a shard or the master, until
any push is in a new version. The bound is 15 s.
versions: whether all shards hold the master's version afterwards.
slow: a cluster at a fifth of the speed, whose pushes come after the windows of the others.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from outer_faults_matrix import BOUND_S, CALM, SLOW, STEPS, Row, all_names, run
from outer_faults_world import FaultProcesses, World, bring_up
from results import save
from spantrain.testbed.testbed import Testbed
from spantrain_studies.outer_demo.orders import OuterDemoOptions, demo_network

SLOWEST, SLOW_SPEED = "d", 0.2
FASTER_LINKS = 2
QUICK = (CALM, "cluster/push", "shard/update", "master/window")


def chosen(text: str | None) -> tuple[str, ...]:
    """Return what `--only` asks for: whole names, or the first part of some."""
    if text is None:
        return all_names()
    asked = text.split(",")
    unknown = [one for one in asked if one not in {part for name in all_names() for part in (name, name.split("/")[0])}]
    if unknown:
        sys.exit(f"no such fault: {', '.join(unknown)}; there are {', '.join(all_names())}")
    return tuple(name for name in all_names() if name in asked or name.split("/")[0] in asked)


def setting_of(*, network: bool) -> OuterDemoOptions:
    """Return clusters, links and rounds."""
    setting = OuterDemoOptions(network=network, say_every_s=0.05, inner_steps=12, grace_s=1.0)
    clusters = [
        replace(
            one,
            speed=SLOW_SPEED if one.name == SLOWEST else one.speed,
            bandwidth_bytes_per_s=FASTER_LINKS * one.bandwidth_bytes_per_s,
        )
        for one in setting.clusters
    ]
    return replace(setting, clusters=tuple(clusters))


class Kept:
    """Rows that were run, also before, when that run was ended."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        told = json.loads(file.read_text()) if file and file.exists() else []
        self.rows = [Row(**one) for one in told]

    def add(self, row: Row) -> None:
        """Keep one more."""
        self.rows = [one for one in self.rows if one.name != row.name] + [row]
        if self._file:
            self._file.write_text(json.dumps([asdict(one) for one in self.rows], indent=1) + "\n")

    def has(self, name: str) -> bool:
        """Whether it was run, and not in vain."""
        return any(one.name == name and not one.skipped for one in self.rows)


def rows_of(
    world: World, testbed: Testbed | None, kept: Kept, names: Sequence[str], options: argparse.Namespace
) -> Iterator[Row]:
    """Go through what was not run before."""
    for name in names:
        if not kept.has(name):
            row = run(name, world, testbed, options.partition_s)
            kept.add(row)
            yield row


def line_of(row: Row) -> str:
    """Return a row as text."""
    if row.skipped:
        return f"{row.victim:10} {row.phase:10} {row.skipped}"
    times = [f"{one:.1f} s" if one is not None else "-" for one in (row.up_s, row.here_s)]
    back = "-" if row.victim in (CALM, SLOW) else "never" if row.back_s is None else f"{row.back_s:.1f} s"
    versions = ("agree" if row.versions_agree else "DIFFER") + ("" if row.hit else "; the phase had just ended")
    return (
        f"{row.victim:10} {row.phase:10} {row.longest_step:>10.2f} x {times[0]:>8} {times[1]:>8} {back:>8}  {versions}"
    )


HEAD = f"{'victim':10} {'phase':10} {'longest step':>12} {'loaded':>8} {'joined':>8} {'back':>8}  versions"


def verdicts(rows: Sequence[Row], samples: dict[str, float]) -> list[str]:
    """Return what holds of what is wanted."""
    ran = [row for row in rows if not row.skipped]
    backs = [(row.back_s or float("inf"), row.name) for row in ran if row.victim not in (CALM, SLOW)]
    slowest = max(backs, default=(0.0, "none"))
    steps = max(((row.longest_step, row.name) for row in ran), default=(0.0, "none"))
    leased = samples["trained"] - samples["unleased"]
    lost, missing = samples["of_killed_lives"] + samples["cut_off"], leased - samples["counted"]
    return [
        f"back within {BOUND_S:.0f} s: {_holds(slowest[0] <= BOUND_S)} (slowest: {slowest[0]:.1f} s, {slowest[1]})",
        f"survivors' inner steps never stop ({STEPS:.0f} of their own at most): {_holds(steps[0] <= STEPS)} "
        f"(longest: {steps[0]:.2f}, {steps[1]})",
        f"versions agree on all shards: {_holds(all(row.versions_agree for row in ran))}",
        f"no sample is counted that was not trained on: {_holds(samples['counted'] <= leased + 1)}",
        f"what was not counted was of clusters that were killed or cut off: {_holds(missing <= lost)} "
        f"({missing:.0f} samples of chunks; such clusters had trained on {lost:.0f})",
    ]


def _holds(good: bool) -> str:
    return "holds" if good else "does not hold"


def slow_line(world: World) -> str:
    """Say how the slowest cluster took part."""
    said = world.clusters[SLOWEST]
    pushes, age = said["outer_rounds"], said["mean_staleness"]
    share = said["tokens"] / sum(one["tokens"] for one in world.clusters.values())
    return f"slow cluster: {pushes:.0f} pushes counted, {age:.1f} versions old on average; {share:.0%} of all tokens"


def measure(options: argparse.Namespace, kept: Kept) -> tuple[list[str], dict[str, Any]]:
    """Run what is asked for; return the lines below the table, and data beside its rows."""
    setting = setting_of(network=not options.no_network)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spantrain-faults-")))
        testbed = stack.enter_context(Testbed.up(demo_network(setting))) if setting.network else None
        processes = stack.enter_context(FaultProcesses(folder / "logs", testbed, os.environ))
        world = World(options=setting, processes=processes)
        bring_up(world, folder, testbed)
        print(HEAD, flush=True)
        for row in rows_of(world, testbed, kept, options.only, options):
            print(line_of(row), flush=True)
        slow, samples = slow_line(world), world.finish()
    told = (
        f"samples: {samples['trained']:.0f} trained, {samples['counted']:.0f} counted, "
        f"{samples['unleased']:.0f} of no chunk while the master was away"
    )
    if not samples["all_given"]:
        told += "; some clusters did not bring in their last round in time"
    return [slow, told, *verdicts(kept.rows, samples)], {"slow": slow, "samples": samples}


def main() -> int:
    """Go through all faults; return 1 if one of them was noticed more than it may be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="some of the faults, as cluster/push or shard, with commas")
    parser.add_argument("--keep", type=Path, help="a file for rows; those that are in it are not run again")
    parser.add_argument("--partition-s", type=float, default=60.0)
    parser.add_argument("--no-network", action="store_true", help="all on loopback: pushes are too short to be seen")
    parser.add_argument("--quick", action="store_true", help="a try: four rows, nothing saved")
    options = parser.parse_args()
    options.only = QUICK if options.quick else chosen(options.only)
    kept = Kept(options.keep)
    try:
        told, data = measure(options, kept)
    except KeyboardInterrupt:
        print("ended; with --keep the rows so far are kept", file=sys.stderr)
        return 130
    rows = sorted(kept.rows, key=lambda row: all_names().index(row.name))
    lines = [HEAD, *map(line_of, rows), "", *told]
    print("\n".join(["", *lines]))
    if {row.name for row in rows} == set(all_names()):
        save("outer_faults", lines, {"rows": [asdict(row) for row in rows], **data})
    return 0 if all(row.sound for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
