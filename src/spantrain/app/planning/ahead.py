"""What of a change of plan goes ahead, beside the steps, so that the change itself takes a moment."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from spantrain.app.planning.protection import room_for_copies
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.records import Record
from spantrain.core.units import Unit
from spantrain.cost.memory import MemoryCost
from spantrain.cost.moving import state_bytes
from spantrain.cost.network import NetworkCost
from spantrain.recovery.protection import is_whole
from spantrain.runtime.control.requests import AheadCopy

_WORTH_S = 0.25
"""What saves less may as well move while all stand still."""
_BESIDE, _SLOWER = 2.0, 0.1
"""How many times as long as the links need alone it takes beside steps, and how much longer these take meanwhile."""
_PART_OF_STEP = 0.5
"""Part of a step that a link may carry the sums of that step, besides what it has to: else they would never come."""
_PATIENCE, _SLACK_S = 6.0, 5.0
"""How many times as long as the links need alone it may take beside steps, and how much longer."""


class MovesAhead(Record):
    """What goes ahead."""

    copies: tuple[AheadCopy, ...]
    size_bytes: int
    move_s: float
    """What it would take while all stand still."""
    left_s: float
    """What is left to move then."""

    @property
    def beside_s(self) -> float:
        """How long it takes beside the steps, about."""
        return _BESIDE * self.move_s

    @property
    def slower_s(self) -> float:
        """How much longer steps take meanwhile, all together."""
        return _SLOWER * self.beside_s

    @property
    def patience_s(self) -> float:
        """How long it may take beside the steps."""
        return _PATIENCE * self.move_s + _SLACK_S


def ahead_of(
    profile: Profile, optimizer: str, before: Plan, after: Plan, steps_s: tuple[float, float]
) -> MovesAhead | None:
    """Return what is to be copied under one plan ahead of another; None where that is not worth the while.

    Whose device or whose way has no room for it takes what it lacks at the change. Until it is there the plan before
    runs on, and where the other one is faster that costs more than a short pause.

    Args:
        profile: of the cluster and the model.
        optimizer: as `cost.memory` names it.
        before: the plan that runs.
        after: the one to come.
        steps_s: seconds of a step before and after.
    """
    found = _Lacking(profile, optimizer, before, after)
    state_s, sums_s = found.seconds(found.state_bytes), found.seconds(found.summed_bytes)
    before_s, after_s = steps_s
    late = {way for way, took_s in sums_s.items() if took_s > _PART_OF_STEP * before_s}
    late |= {found.way(copy) for copy in found.copies if not found.fits(copy)}
    copies = tuple(copy for copy in found.copies if found.way(copy) not in late)
    move_s = max((state_s[found.way(copy)] for copy in copies), default=0.0)
    left_s = max(*(sums_s[found.way(copy)] for copy in copies), *(state_s[way] for way in late), 0.0, 0.0)
    saved_s = move_s - left_s
    delay_s = math.ceil(_BESIDE * move_s / before_s) * (before_s - after_s + _SLOWER * before_s)
    if not copies or saved_s < max(_WORTH_S, delay_s):
        return None
    return MovesAhead(copies=copies, size_bytes=sum(map(found.state_bytes, copies)), move_s=move_s, left_s=left_s)


class _Lacking:
    """Units that devices lack of a plan, each from the device that gives it soonest."""

    def __init__(self, profile: Profile, optimizer: str, before: Plan, after: Plan) -> None:
        self._profile, self._optimizer = profile, optimizer
        self._network = NetworkCost(profile)
        self._givers = {unit: stage.devices for stage in before.stages if is_whole(stage) for unit in stage.units}
        self._had = dict[str, set[int]]()
        for stage in filter(is_whole, before.stages):
            for name in (*stage.devices, *stage.keepers):
                self._had.setdefault(name, set()).update(stage.units)
        self._rooms = [
            room_for_copies(plan, profile, MemoryCost(profile, optimizer, plan.dtype)) for plan in (before, after)
        ]
        self.copies = tuple(self._copies(after))

    def way(self, copy: AheadCopy) -> str:
        """Return what a copy shares with others: the line between two sites, hosts or devices."""
        return self._network.shared_link(copy.giver, copy.taker)

    def state_bytes(self, copy: AheadCopy) -> int:
        """Return the bytes of parameters and optimizer state."""
        return sum(state_bytes(unit, self._optimizer) for unit in self._units(copy))

    def summed_bytes(self, copy: AheadCopy) -> int:
        """Return the bytes of what is summed in a step."""
        return sum(unit.trained_bytes for unit in self._units(copy))

    def seconds(self, size_of: Callable[[AheadCopy], int]) -> dict[str, float]:
        """Return how long each way carries something of all copies."""
        found = defaultdict[str, float](float)
        for copy in self.copies:
            found[self.way(copy)] += self._network.transfer_seconds(copy.giver, copy.taker, size_of(copy))
        return found

    def fits(self, copy: AheadCopy) -> bool:
        """Whether both sides have room: the taker for a copy, the giver for one of what has changed before it went."""
        size = self.state_bytes(copy)
        return all(
            room.get(memory_of.get(name, name), size) >= size
            for room, memory_of in self._rooms
            for name in (copy.giver, copy.taker)
        )

    def _units(self, copy: AheadCopy) -> Iterator[Unit]:
        return (self._profile.graph.units[unit] for unit in copy.units)

    def _copies(self, after: Plan) -> Iterator[AheadCopy]:
        given = defaultdict[str, int](int)
        for crew in after.crews:
            for taker in crew.devices if is_whole(crew.first) else ():
                lacking: defaultdict[Sequence[str], list[int]] = defaultdict(list)
                for unit in crew.units:
                    if unit in self._givers and unit not in self._had.get(taker, ()):
                        lacking[self._givers[unit]].append(unit)
                for givers, units in lacking.items():
                    giver = min(givers, key=lambda one: (self._network.transfer_seconds(one, taker, 2**20), given[one]))
                    given[giver] += 1
                    yield AheadCopy(giver=giver, taker=taker, units=tuple(units))
