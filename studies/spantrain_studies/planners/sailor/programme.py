"""Sailor's dynamic programme (section 4.2.2, equation 1 and listing 1): which devices each stage gets, for one width.

The straggler's seconds are assumed beforehand (section 4.2.3) instead of being corrected while solving: stages that
take longer are not allowed. What is left to be least is a sum over stages, of seconds or of money. A state is the
stage, the site it is in, the sites passed before, and how many devices are left there of each kind: a pipeline does not
come back to a site (the listing goes on to the "next region"). A stage mixes two kinds at most, and then takes all that
is left of one of them: with equal degrees, more mixed stages can be exchanged for whole ones that are no slower.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Taken = tuple[tuple[int, int], ...]
"""Supplies (by index) and how many replicas of a stage each gives."""
_Left = tuple[int, ...]
_State = tuple[int, int, _Left]
"""Sites passed and the present one, as bits; the present one; devices left there, by supply."""
_NEAREST = 3
"""Sites that a pipeline may go on to, of those it has not passed."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one programme solves. Rows are supplies, columns stages."""

    width: int
    """Replicas of every stage (data-parallel degree D)."""
    straggler_s: float
    seconds: Sequence[Sequence[float]]
    degrees: Sequence[Sequence[int]]
    """Of tensor parallelism; 0 where the stage does not fit."""
    worth: Sequence[Sequence[float]]
    """What one replica adds to the sum, besides the seconds of the stage."""
    second_worth: float
    """What a second of the stage's slowest replica adds to the sum."""
    supplies_by_site: Sequence[Sequence[int]]
    count: Sequence[int]
    """Devices, by supply."""
    left_over: Mapping[tuple[int, int], int]
    """Devices of a supply that a degree cannot use, by (supply, degree)."""
    crossing: Sequence[Sequence[Sequence[float]]]
    """What the cut behind a stage adds to the sum, by [site][next site][stage]."""

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.seconds[0])


def solve(task: Task) -> tuple[float, tuple[Taken, ...]] | None:
    """Return the least sum and what each stage takes; None if the devices are not enough."""
    layer: dict[_State, tuple[float, _State | None, Taken]] = {}
    for site, supplies in enumerate(task.supplies_by_site):
        full = tuple(task.count[supply] for supply in supplies)
        for value, left, taken in _choices(task, 0, site, full):
            layer[1 << site, site, left] = (value, None, taken)
    layers = [layer]
    for stage in range(1, task.stages):
        layer = {}
        for state, (value, _, _) in layers[-1].items():
            for more, following, taken in _next(task, stage, state):
                known = layer.get(following)
                if known is None or value + more < known[0]:
                    layer[following] = (value + more, state, taken)
        if not layer:
            return None
        layers.append(layer)
    if not layers[-1]:
        return None
    last = min(layers[-1], key=lambda entry: layers[-1][entry][0])
    return layers[-1][last][0], _way_back(layers, last)


def _way_back(layers: Sequence[Mapping[_State, tuple[float, _State | None, Taken]]], last: _State) -> tuple[Taken, ...]:
    state: _State | None = last
    found: list[Taken] = []
    for layer in reversed(layers):
        assert state is not None
        _, state, taken = layer[state]
        found.append(taken)
    return tuple(reversed(found))


def _next(task: Task, stage: int, state: _State) -> Iterator[tuple[float, _State, Taken]]:
    """Yield what the next stage may be: where the pipeline is, or in a site it has not passed."""
    passed, site, left = state
    for value, rest, taken in _choices(task, stage, site, left):
        yield value + task.crossing[site][site][stage - 1], (passed, site, rest), taken
    others = [other for other in range(len(task.supplies_by_site)) if not passed >> other & 1]
    if len(others) > _NEAREST:
        others = sorted(others, key=lambda place: task.crossing[site][place][stage - 1])[:_NEAREST]
    for other in others:
        full = tuple(task.count[supply] for supply in task.supplies_by_site[other])
        for value, rest, taken in _choices(task, stage, other, full):
            yield value + task.crossing[site][other][stage - 1], (passed | 1 << other, other, rest), taken


def _choices(task: Task, stage: int, site: int, left: _Left) -> Iterator[tuple[float, _Left, Taken]]:
    """Yield ways to give a stage its replicas from what is left in a site."""
    supplies = task.supplies_by_site[site]
    room = [_replicas(task, stage, supply, count) for supply, count in zip(supplies, left, strict=True)]
    for place in range(len(supplies)):
        if room[place] >= task.width:
            yield _given(task, stage, site, left, {place: task.width})
        elif room[place] > 0:
            missing = task.width - room[place]
            for other in range(len(supplies)):
                if other != place and room[other] >= missing:
                    yield _given(task, stage, site, left, {place: room[place], other: missing})


def _replicas(task: Task, stage: int, supply: int, left: int) -> int:
    """Return how many replicas of a stage the rest of a supply can be."""
    degree = task.degrees[supply][stage]
    if degree == 0 or task.seconds[supply][stage] > task.straggler_s:
        return 0
    return max(0, left - task.left_over[supply, degree]) // degree


def _given(task: Task, stage: int, site: int, left: _Left, replicas: Mapping[int, int]) -> tuple[float, _Left, Taken]:
    rest, value, slowest_s, taken = list(left), 0.0, 0.0, []
    for place, count in replicas.items():
        supply = task.supplies_by_site[site][place]
        rest[place] -= count * task.degrees[supply][stage]
        value += count * task.worth[supply][stage]
        slowest_s = max(slowest_s, task.seconds[supply][stage])
        taken.append((supply, count))
    return value + task.second_worth * slowest_s, tuple(rest), tuple(taken)
