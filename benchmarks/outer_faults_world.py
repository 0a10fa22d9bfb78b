"""The running processes of `outer_faults.py`, what each said last, and what was trained and counted."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spantrain.testbed.testbed import Testbed
from spantrain_studies.outer_demo.orders import (
    LENGTH,
    MASTER,
    OuterDemoOptions,
    cluster_order,
    host_of,
    master_order,
    shard_order,
)
from spantrain_studies.outer_demo.processes import DemoProcesses

START_S = 180.0
_SAID_EVERY_S = 0.5
"""A cluster, at the end of a step."""
_LEASED_S = 1.0
_FINISH_S = 60.0


class FaultProcesses(DemoProcesses):
    """Processes that can be stopped for a while, too."""

    def freeze(self, name: str) -> None:
        """Let a process do nothing."""
        os.kill(self._processes[name].pid, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """Let it go on."""
        os.kill(self._processes[name].pid, signal.SIGCONT)

    def kill(self, name: str) -> None:
        """End a process at once, as a machine that loses its power does; its end is heard of like any other."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()
        self._readers.pop(name).join()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@dataclass(kw_only=True)
class World:
    """The running processes, and the last that each said."""

    options: OuterDemoOptions
    processes: FaultProcesses
    orders: dict[str, tuple[Mapping[str, Any], str]] = field(default_factory=dict)
    standing: Mapping[str, Any] = field(default_factory=dict)
    """The master's last."""
    clusters: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    first_s: dict[str, float] = field(default_factory=dict)
    """When each process said something first, in its present life."""
    longest_s: dict[str, float] = field(default_factory=dict)
    """Between the ends of two inner steps."""
    heard_s: dict[str, float] = field(default_factory=dict)
    endpoints: dict[str, str] = field(default_factory=dict)
    """Of shards, as they say."""
    trained: dict[tuple[str, int], float] = field(default_factory=dict)
    """Samples, by cluster and its life."""
    unleased: dict[tuple[str, int], float] = field(default_factory=dict)
    """Of these: that were of no chunk, since the master was away."""
    cut_off: float = 0.0
    """Samples that clusters trained on while they were cut off, and in the two rounds before: their leases ended."""
    lives: dict[str, int] = field(default_factory=dict)
    may_end: set[str] = field(default_factory=set)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the clusters."""
        return tuple(one.name for one in self.options.clusters)

    def step_s(self, name: str) -> float:
        """Return a cluster's seconds of an inner step."""
        return next(self.options.step_s / one.speed for one in self.options.clusters if one.name == name)

    def leased(self, name: str) -> float:
        """Return the samples of chunks that a cluster trained on in its present life."""
        life = name, self.lives[name]
        return self.trained[life] - self.unleased[life]

    def start(self, name: str) -> None:
        """Start a process, for the first time or again."""
        order, host = self.orders[name]
        self.lives[name] = self.lives.get(name, 0) + 1
        self.clusters.pop(name, None)
        self.first_s.pop(name, None)
        self.may_end.discard(name)
        self.processes.start(name, order, host=host)

    def kill(self, name: str) -> None:
        """Kill it, and take in what it said before."""
        self.may_end.add(name)
        self.processes.kill(name)
        while (heard := self.processes.next(0.0)) is not None:
            self._take(*heard)
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
                self._take(*heard)
        return True

    def hear_master(self, seconds: float) -> None:
        """Wait for what the master says next."""
        before = self.standing
        self.listen(seconds, lambda: self.standing is not before)

    def _take(self, now_s: float, name: str, message: Mapping[str, Any] | None) -> None:
        if message is None:
            if name not in self.may_end:
                sys.exit(f"ended by itself: {self.processes.how_it_ended(name)}")
            return
        self.first_s.setdefault(name, now_s)
        if name == MASTER:
            # A master that was started again knows nobody until they have come back.
            self.standing = message if "states" in message else {**self.standing, "states": {}}
        elif "endpoint" in message:
            self.endpoints[name] = message["endpoint"]
        elif "inner_steps" in message:
            self.clusters[name], self.heard_s[name] = message, now_s
            self.longest_s[name] = max(self.longest_s.get(name, 0.0), message["longest_step_s"])
            self.trained[name, self.lives[name]] = message["tokens"] / LENGTH
            self.unleased[name, self.lives[name]] = message["uncounted_samples"]

    def longest_steps(self, names: Sequence[str]) -> dict[str, float]:
        """Return the longest time between the ends of two inner steps since it was cleared, of each of these clusters.

        Of one that has said nothing for long it is at least how long that is.
        """
        now_s = time.monotonic()
        silent_s = {name: now_s - self.heard_s[name] - _SAID_EVERY_S for name in names}
        return {name: max(self.longest_s.get(name, 0.0), silent_s[name]) for name in names}

    # What the master said last.

    def state(self, name: str) -> str:
        """Return a cluster's or a shard's."""
        return str(self.standing.get("states", {}).get(name, "away"))

    def phases_of(self, names: Sequence[str]) -> set[str]:
        """Return the phases of a round that some of these clusters are in."""
        moving = {way for name, way in self.standing.get("moving", ()) if name in names}
        waiting = {"window"} if any(self.state(name) == "waiting" for name in names) else set()
        return moving | waiting or {"training"}

    @property
    def version(self) -> int:
        """The newest."""
        return int(self.standing["version"])

    @property
    def counted(self) -> int:
        """Tokens in versions."""
        return sum(self.standing["tokens_counted"].values())

    @property
    def shards_ready(self) -> bool:
        """Whether all shards serve, and the master knows where they listen now."""
        known = self.standing.get("shard_endpoints", {})
        return all(self.state(name) == "ready" and known[name] == self.endpoints[name] for name in self.options.shards)

    @property
    def agree(self) -> bool:
        """Whether all shards hold the master's version."""
        versions = self.standing.get("shard_versions", {})
        return all(self.standing["version"] in versions.get(shard, ()) for shard in self.options.shards)

    @property
    def well(self) -> bool:
        """Whether all are there and train, and all shards hold the version."""
        here = all(self.state(name) in ("training", "waiting") and name in self.clusters for name in self.names)
        return here and self.shards_ready and self.agree

    # The end.

    def finish(self) -> dict[str, float]:
        """Let clusters give what is left; return what was trained and what was counted of it, in samples."""
        for name in self.names:
            self.processes.stop(name)
            self.may_end.add(name)
        given = self.listen(_FINISH_S, lambda: all(self._has_given(name) for name in self.names))
        self.hear_master(_LEASED_S)
        killed = sum(samples for (name, life), samples in self.trained.items() if life < self.lives[name])
        return {
            "trained": sum(self.trained.values()),
            "counted": float(self.standing["samples_counted"]),
            "of_killed_lives": killed,
            "cut_off": self.cut_off,
            "all_given": float(given),
            "unleased": float(sum(self.unleased.values())),
        }

    def _has_given(self, name: str) -> bool:
        return "real_compute_ratio" in self.clusters.get(name, {})


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
    if not world.listen(START_S, lambda: world.well and world.version >= 2):
        sys.exit(f"it did not come up in {START_S:.0f} s: {world.standing}")
