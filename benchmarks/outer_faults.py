"""Kill a cluster, a shard and the master at every phase of a round, and cut a cluster off: who else notices it.

python benchmarks/outer_faults.py [--victims cluster,shard,master,partition,slow] [--phases training,push,window,pull]
                                  [--partition-s 60] [--no-network] [--quick]

Real: processes, signals (kill -9), TCP through the testbed's router, encryption, gradients, the files of master and
shards. Emulated: the clusters' seconds per step, and their links (20, 20, 10 and 5 Mbit/s). One run for all rows: after
each fault it goes on until all is well again.

longest step: of the survivors, between the fault and the recovery, in units of their own step. 1 is undisturbed.
back: from the restart (or the end of the cut) until a push of the restarted cluster is in a version, or, for a shard or
the master, until there is a new version. The bound is 15 s.
versions: whether all shards hold the master's version afterwards.
"""

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from results import save
from spantrain.app.outer_demo_model import LENGTH
from spantrain.app.outer_demo_orders import (
    HUB,
    MASTER,
    OuterDemoOptions,
    cluster_order,
    demo_network,
    host_of,
    master_order,
    shard_order,
)
from spantrain.app.outer_demo_processes import DemoProcesses
from spantrain.core.speed import SpeedTrace
from spantrain.testbed.testbed import Testbed

BOUND_S = 15.0
PHASES = ("training", "push", "window", "pull")
VICTIMS = ("cluster", "shard", "master", "partition", "slow")
CLUSTER, SHARD, SLOW = "b", "s1", "d"
DOWN_S = 2.0
START_S = 180.0
PHASE_S = 120.0
BACK_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One fault."""

    victim: str
    phase: str
    longest_step: float
    """Of the survivors', over their own seconds of a step."""
    back_s: float | None
    """None: it did not come back in time."""
    versions_agree: bool
    skipped: str = ""

    @property
    def sound(self) -> bool:
        """Whether it is as it should be."""
        return not self.skipped and self.back_s is not None and self.back_s <= BOUND_S and self.versions_agree


@dataclass(kw_only=True)
class World:
    """The running processes, and the last that each said."""

    options: OuterDemoOptions
    processes: DemoProcesses
    orders: dict[str, tuple[Mapping[str, Any], str]] = field(default_factory=dict)
    standing: Mapping[str, Any] = field(default_factory=dict)
    clusters: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    longest: dict[str, float] = field(default_factory=dict)
    trained: dict[tuple[str, int], float] = field(default_factory=dict)
    """Samples, by cluster and its life."""
    unleased: dict[tuple[str, int], float] = field(default_factory=dict)
    """Of these: that were no part of a chunk, since the master was away."""
    lives: dict[str, int] = field(default_factory=dict)
    may_end: set[str] = field(default_factory=set)

    def start(self, name: str) -> None:
        """Start a process, for the first time or again."""
        order, host = self.orders[name]
        self.lives[name] = self.lives.get(name, 0) + 1
        self.clusters.pop(name, None)
        self.may_end.discard(name)
        self.processes.start(name, order, host=host)

    def kill(self, name: str) -> None:
        """Kill it, and take in what it said before."""
        self.may_end.add(name)
        self.processes.kill(name)
        while (heard := self.processes.next(0.0)) is not None:
            self._take(heard[1], heard[2])
        self.clusters.pop(name, None)

    def listen(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Take in what is said, for so long or until something holds; return whether it does."""
        end_s = time.monotonic() + seconds
        while not until():
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return False
            heard = self.processes.next(min(left_s, 0.2))
            if heard is not None:
                self._take(heard[1], heard[2])
        return True

    def _take(self, name: str, message: Mapping[str, Any] | None) -> None:
        if message is None:
            if name not in self.may_end:
                sys.exit(f"ended by itself: {self.processes.how_it_ended(name)}")
        elif name == MASTER:
            self.standing = message if "states" in message else self.standing
        elif "inner_steps" in message:
            self.clusters[name] = message
            self.longest[name] = max(self.longest.get(name, 0.0), message["longest_step_s"])
            self.trained[name, self.lives[name]] = message["tokens"] / LENGTH
            self.unleased[name, self.lives[name]] = message["uncounted_samples"]

    def phase_of(self, names: Sequence[str]) -> set[str]:
        """Return the phases that some of these clusters are in."""
        moving = [way for name, way in self.standing.get("moving", ()) if name in names]
        waiting = any(self.standing.get("states", {}).get(name) == "waiting" for name in names)
        found = {way for way in moving if way in PHASES} | ({"window"} if waiting else set())
        return found or {"training"}

    @property
    def well(self) -> bool:
        """Whether all are there and all shards hold the version."""
        states = self.standing.get("states", {})
        names = [one.name for one in self.options.clusters]
        here = all(states.get(name) in ("training", "waiting") and name in self.clusters for name in names)
        return here and all(states.get(shard) == "ready" for shard in self.options.shards) and self.agree

    @property
    def agree(self) -> bool:
        """Whether all shards hold the master's version."""
        versions = self.standing.get("shard_versions", {})
        return all(self.standing["version"] in versions.get(shard, ()) for shard in self.options.shards)


def bring_up(world: World, state: Path, testbed: Testbed | None) -> None:
    """Start all of it, and wait until there is a version that all have."""
    address: Callable[[str], str] = testbed.address if testbed else lambda _: "127.0.0.1"
    order = dict(master_order(world.options, state, address(MASTER)))
    del order["remove"]  # it is killed, and needs its folder again
    world.orders[MASTER] = (order, MASTER)
    world.start(MASTER)
    joining = world.processes.wait_for(MASTER, "token", START_S)
    for shard in world.options.shards:
        world.orders[shard] = (shard_order(world.options, state, address(shard), shard, joining), shard)
        world.start(shard)
    for cluster in world.options.clusters:
        world.orders[cluster.name] = (cluster_order(world.options, cluster, joining), host_of(cluster.name))
        world.start(cluster.name)
    if not world.listen(START_S, lambda: world.well and world.standing["version"] >= 2):
        sys.exit(f"it did not come up in {START_S:.0f} s: {world.standing}")


def fault(world: World, victim: str, phase: str) -> Row:
    """Kill a process in a phase, start it again, and wait until it takes part."""
    name = {"cluster": CLUSTER, "shard": SHARD, "master": MASTER}[victim]
    others = [one.name for one in world.options.clusters if one.name != name]
    looked_at = [CLUSTER] if victim == "cluster" else others
    if not world.listen(PHASE_S, lambda: world.well) or not world.listen(
        PHASE_S, lambda: phase in world.phase_of(looked_at)
    ):
        why = f"no such moment in {PHASE_S:.0f} s"
        return Row(victim=victim, phase=phase, longest_step=math.nan, back_s=None, versions_agree=False, skipped=why)
    world.longest.clear()
    world.kill(name)
    version = world.standing["version"]
    world.listen(DOWN_S)
    since_s = time.monotonic()
    world.start(name)
    back = (
        (lambda: world.clusters.get(name, {}).get("outer_rounds", 0) >= 1)
        if victim == "cluster"
        else (lambda: world.standing["version"] > version)
    )
    came = world.listen(BACK_S, back)
    return _row(world, victim, phase, others, time.monotonic() - since_s if came else None)


def cut_off(world: World, testbed: Testbed, seconds: float) -> Row:
    """Let a cluster's link carry nothing for so long, then wait until a push of it counts."""
    others = [one.name for one in world.options.clusters if one.name != CLUSTER]
    world.listen(PHASE_S, lambda: world.well)
    world.longest.clear()
    nothing = SpeedTrace(changes=((0.0, 0.0), (seconds, 1.0)))
    testbed.follow({f"{CLUSTER}->{HUB}": nothing, f"{HUB}->{CLUSTER}": nothing})
    world.listen(seconds)
    since_s = time.monotonic()
    rounds = world.clusters[CLUSTER]["outer_rounds"]
    came = world.listen(BACK_S, lambda: world.clusters[CLUSTER]["outer_rounds"] > rounds)
    back_s = time.monotonic() - since_s if came else None
    return _row(world, "partition", f"{seconds:.0f} s", [*others, CLUSTER], back_s)


def _row(world: World, victim: str, phase: str, survivors: Sequence[str], back_s: float | None) -> Row:
    step_s = {one.name: world.options.step_s / one.speed for one in world.options.clusters}
    world.listen(1.0)
    longest = max(world.longest.get(name, 0.0) / step_s[name] for name in survivors)
    agree = world.listen(30.0, lambda: world.agree)
    return Row(victim=victim, phase=phase, longest_step=longest, back_s=back_s, versions_agree=agree)


def rows_of(world: World, testbed: Testbed | None, options: argparse.Namespace) -> Iterator[Row]:
    """Go through the matrix."""
    for victim in options.victims:
        for phase in options.phases if victim in ("cluster", "shard", "master") else ():
            yield fault(world, victim, phase)
        if victim == "partition" and testbed is not None:
            yield cut_off(world, testbed, options.partition_s)


def slow_one(world: World) -> dict[str, float]:
    """Return how the slowest cluster took part: it comes after every window."""
    world.listen(PHASE_S, lambda: world.well and world.clusters[SLOW]["outer_rounds"] >= 2)
    message = world.clusters[SLOW]
    return {name: message[name] for name in ("outer_rounds", "mean_staleness", "inner_steps")}


def finish(world: World) -> dict[str, float]:
    """Let clusters give what is left; return what was trained and what was counted of it, in samples."""
    for one in world.options.clusters:
        world.processes.stop(one.name)
        world.may_end.add(one.name)
    world.listen(60.0, lambda: not any(_runs(world, one.name) for one in world.options.clusters))
    world.listen(2.0)
    trained = sum(world.trained.values())
    counted = float(world.standing["samples_counted"])
    killed = sum(samples for (name, life), samples in world.trained.items() if life < world.lives[name])
    unleased = sum(world.unleased.values())
    return {"trained": trained, "counted": counted, "of_killed_lives": killed, "unleased": unleased}


def _runs(world: World, name: str) -> bool:
    return "real_compute_ratio" not in world.clusters.get(name, {})


def table(rows: Sequence[Row]) -> list[str]:
    """Return the rows as text."""
    lines = [f"{'victim':10} {'phase':10} {'longest step':>13} {'back':>8}  versions"]
    for row in rows:
        back = "never" if row.back_s is None else f"{row.back_s:.1f} s"
        told = row.skipped or ("agree" if row.versions_agree else "DIFFER")
        lines.append(f"{row.victim:10} {row.phase:10} {row.longest_step:>11.2f} x {back:>8}  {told}")
    return lines


def main() -> int:
    """Go through all faults; return 1 if one of them was noticed more than it may be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--victims", type=lambda text: text.split(","), default=list(VICTIMS))
    parser.add_argument("--phases", type=lambda text: text.split(","), default=None)
    parser.add_argument("--partition-s", type=float, default=60.0)
    parser.add_argument("--no-network", action="store_true", help="all on loopback: pushes are too short to be seen")
    parser.add_argument("--quick", action="store_true", help="a try: one phase, a short cut, nothing saved")
    options = parser.parse_args()
    options.phases = options.phases or list(PHASES[:1] if options.quick else PHASES)
    options.partition_s = 15.0 if options.quick else options.partition_s
    setting = OuterDemoOptions(network=not options.no_network, say_every_s=0.05, inner_steps=8, grace_s=1.0)
    clusters = [replace(one, speed=0.2) if one.name == SLOW else one for one in setting.clusters]
    setting = replace(setting, clusters=tuple(clusters))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spantrain-faults-")))
        testbed = stack.enter_context(Testbed.up(demo_network(setting))) if setting.network else None
        processes = stack.enter_context(DemoProcesses(folder / "logs", testbed, os.environ))
        world = World(options=setting, processes=processes)
        bring_up(world, folder, testbed)
        rows = []
        for row in rows_of(world, testbed, options):
            rows.append(row)
            print(table([row])[1], flush=True)
        slow = slow_one(world) if "slow" in options.victims else {}
        samples = finish(world)
    lines = table(rows)
    if slow:
        age = f"{slow['mean_staleness']:.1f} versions old on average"
        lines.append(f"slow cluster: {slow['outer_rounds']:.0f} pushes counted, {age}")
    lines.append(
        f"samples: {samples['trained']:.0f} trained, {samples['counted']:.0f} counted, "
        f"{samples['unleased']:.0f} of no chunk while the master was away, killed clusters had trained "
        f"{samples['of_killed_lives']:.0f} (counted in part)"
    )
    print("\n".join(lines))
    if not options.quick:
        save("outer_faults", lines, {"rows": [asdict(row) for row in rows], "slow": slow, "samples": samples})
    return 0 if all(row.sound for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
