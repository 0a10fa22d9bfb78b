"""The faults of `outer_faults.py`: one after the other in one run, each from a quiet state to the recovery."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from outer_faults_world import World
from spantrain.core.speed import SpeedTrace
from spantrain.testbed.testbed import Testbed
from spantrain_studies.outer_demo.orders import HUB, MASTER

BOUND_S = 15.0
STEPS = 3.0
"""Of its own, that a survivor's step may take: steps never stop."""
PHASES = ("training", "push", "window", "update", "pull")
KILLED = ("cluster", "shard", "master")
CLUSTER, SHARD, OTHER_SHARD = "b", "s1", "s0"
CALM, CUT, SLOW = "calm", "partition", "slow"
_CALM_S = 10.0
_DOWN_S = 2.0
_PHASE_S = 120.0
_BACK_S = 120.0
_AGREE_S = 30.0
_WINDOW_OVER_S = 0.5
"""After its end, until the update with it has begun."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One fault."""

    victim: str
    phase: str
    longest_steps: Mapping[str, float]
    """Of the survivors, over their own seconds of a step, from the fault to the recovery."""
    up_s: float | None = None
    """From the start of the process until it says something: it has loaded what it needs."""
    here_s: float | None = None
    """Until the master knows it, or knows all shards again."""
    back_s: float | None = None
    """Until what it has learned since is in a version, or, of a shard or the master, any cluster's push. None: not in
    time."""
    versions_agree: bool = False
    """Whether all shards hold the master's version afterwards."""
    hit: bool = True
    """Whether the phase still lasted when the process was killed."""
    skipped: str = ""

    @property
    def name(self) -> str:
        """As `--only` takes it."""
        return f"{self.victim}/{self.phase}" if self.phase else self.victim

    @property
    def longest_step(self) -> float:
        """Of all survivors."""
        return max(self.longest_steps.values(), default=math.nan)

    @property
    def sound(self) -> bool:
        """Whether it is as it should be."""
        back = self.victim in (CALM, SLOW) or (self.back_s is not None and self.back_s <= BOUND_S)
        return not self.skipped and back and self.versions_agree and self.longest_step <= STEPS


def all_names() -> tuple[str, ...]:
    """Return the whole matrix, in its order."""
    return (CALM, *(f"{victim}/{phase}" for victim in KILLED for phase in PHASES), CUT, SLOW)


def run(name: str, world: World, testbed: Testbed | None, cut_s: float) -> Row:
    """Do one of `all_names`; one that cannot be done says why."""
    victim, _, phase = name.partition("/")
    if not world.listen(_PHASE_S, lambda: world.well):
        return _skipped(victim, phase, f"not all was well after {_PHASE_S:.0f} s")
    world.longest_s.clear()
    match victim:
        case "calm":
            world.listen(_CALM_S)
            return Row(victim=victim, phase="", longest_steps=_longest(world, world.names), versions_agree=world.agree)
        case "slow":
            return _slow(world)
        case "partition" if testbed is None:
            return _skipped(victim, "", "there is no emulated network")
        case "partition":
            assert testbed
            return _cut_off(world, testbed, cut_s)
    return _killed(world, victim, phase)


def _killed(world: World, victim: str, phase: str) -> Row:
    """Kill a process in a phase, start it again, and wait until it takes part."""
    name = {"cluster": CLUSTER, "shard": SHARD, "master": MASTER}[victim]
    seen_in = [CLUSTER] if victim == "cluster" else list(world.names)
    survivors = [one for one in world.names if one != name]
    if not _reach(world, phase, seen_in):
        return _skipped(victim, phase, f"no such moment in {_PHASE_S:.0f} s")
    world.longest_s.clear()
    world.kill(name)
    hit = _lasts(world, phase, seen_in, killed=name)
    if phase == "update":
        world.processes.thaw(OTHER_SHARD)
    counted = world.counted
    world.listen(_DOWN_S)
    since_s = time.monotonic()
    world.start(name)
    here, back = _signs(world, name, counted)
    here_s = _after(since_s, world.listen(_BACK_S, here))
    back_s = _after(since_s, here_s is not None and world.listen(_BACK_S, back))
    up_s = world.first_s[name] - since_s if name in world.first_s else None
    return _row(world, victim, phase, survivors, up_s=up_s, here_s=here_s, back_s=back_s, hit=hit)


def _reach(world: World, phase: str, seen_in: Sequence[str]) -> bool:
    """Wait for a phase. An update takes milliseconds: a shard that is stopped makes it last."""
    wanted = "window" if phase == "update" else phase
    if not world.listen(_PHASE_S, lambda: wanted in world.phases_of(seen_in)):
        return False
    if phase == "update":
        world.processes.freeze(OTHER_SHARD)
        world.listen(world.options.grace_s + _WINDOW_OVER_S)
    return True


def _lasts(world: World, phase: str, seen_in: Sequence[str], *, killed: str) -> bool:
    """Return whether the master was in that phase when a process was killed, by what it says next, or said last."""
    if killed != MASTER:
        world.hear_master(_DOWN_S)
    return ("window" if phase == "update" else phase) in world.phases_of(seen_in)


def _signs(world: World, name: str, counted: int) -> tuple[Callable[[], bool], Callable[[], bool]]:
    """Return when a process that was started is known to the master, and when it takes part."""
    if name in world.names:
        return (
            lambda: world.clusters.get(name, {}).get("version", 0) > 0,
            lambda: world.clusters.get(name, {}).get("outer_rounds", 0) >= 1,
        )
    return (
        lambda: name in world.first_s and world.shards_ready,
        lambda: world.counted > counted and world.shards_ready,
    )


def _after(since_s: float, came: bool) -> float | None:
    return time.monotonic() - since_s if came else None


def _cut_off(world: World, testbed: Testbed, seconds: float) -> Row:
    """Let a cluster's link carry nothing for so long, then wait until a push of it counts."""
    nothing = SpeedTrace(changes=((0.0, 0.0), (seconds, 1.0)))
    testbed.follow({f"{CLUSTER}->{HUB}": nothing, f"{HUB}->{CLUSTER}": nothing})
    before = world.leased(CLUSTER) - 2 * world.options.inner_steps * world.options.batch
    world.listen(seconds)
    world.cut_off += world.leased(CLUSTER) - before
    since_s = time.monotonic()
    rounds = world.clusters[CLUSTER]["outer_rounds"]
    here_s = _after(since_s, world.listen(_BACK_S, lambda: world.state(CLUSTER) in ("training", "waiting")))
    back = world.listen(_BACK_S, lambda: world.clusters[CLUSTER]["outer_rounds"] > rounds)
    return _row(world, CUT, "", world.names, here_s=here_s, back_s=_after(since_s, back))


def _slow(world: World) -> Row:
    """Wait until the slowest cluster, which comes after the windows of others, has taken part twice."""
    slow = min(world.options.clusters, key=lambda one: one.speed).name
    came = world.listen(_PHASE_S, lambda: world.clusters[slow]["outer_rounds"] >= 2)
    row = _row(world, SLOW, "", [slow])
    return row if came else _skipped(SLOW, "", f"it took part less than twice, after {_PHASE_S:.0f} s")


def _row(
    world: World, victim: str, phase: str, survivors: Sequence[str], *, up_s: float | None = None,
    here_s: float | None = None, back_s: float | None = None, hit: bool = True,
) -> Row:  # fmt: skip
    world.listen(1.0)
    longest = _longest(world, survivors)
    agree = world.listen(_AGREE_S, lambda: world.agree)
    return Row(
        victim=victim, phase=phase, longest_steps=longest, up_s=up_s, here_s=here_s, back_s=back_s,
        versions_agree=agree, hit=hit,
    )  # fmt: skip


def _longest(world: World, names: Sequence[str]) -> dict[str, float]:
    return {name: longest_s / world.step_s(name) for name, longest_s in world.longest_steps(names).items()}


def _skipped(victim: str, phase: str, why: str) -> Row:
    return Row(victim=victim, phase=phase, longest_steps={}, skipped=why)
