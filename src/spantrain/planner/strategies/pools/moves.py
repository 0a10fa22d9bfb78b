"""Small changes of a candidate: a stage dropped, added, made up otherwise or exchanged with the next; another width."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from spantrain.planner.strategies.pools.members import Member
from spantrain.planner.strategies.pools.recipes import Candidate, Recipe

_MOST_MIXED = 12
"""Sorts of replicas up to which stages of two sorts are tried."""


def other_widths(
    candidate: Candidate, available: Mapping[int, int], widths: Sequence[tuple[int, int]]
) -> Iterator[Candidate]:
    """Yield the same stages with other widths, given with their micro-batches, as far as there are devices."""
    if all(len(recipe) == 1 for recipe in candidate.recipes):
        for width, micro_batches in widths:
            recipes = tuple(((recipe[0][0], width),) for recipe in candidate.recipes)
            other = candidate._replace(width=width, micro_batches=micro_batches, recipes=recipes)
            if width != candidate.width and all(n <= available[pool] for pool, n in other.devices_by_kind.items()):
                yield other


def neighbours(
    candidate: Candidate, available: Mapping[int, int], degrees: Mapping[int, Sequence[int]], units: int
) -> Iterator[Candidate]:
    """Yield candidates that differ in a stage and use no more devices of a kind than there are.

    `available` counts devices by the pool that stands for their kind, `degrees` are those that may be used there.
    """
    recipes = candidate.recipes
    for at in range(len(recipes) - 1):
        if recipes[at] != recipes[at + 1]:
            yield _with(candidate, at, at + 2, recipes[at + 1], recipes[at])
    if len(recipes) > 1:
        for at in range(len(recipes)):
            if not at or recipes[at] != recipes[at - 1]:
                yield _with(candidate, at, at + 1)
    used = candidate.devices_by_kind
    spare = {pool: count - used[pool] for pool, count in available.items()}
    if len(recipes) < units:
        for recipe in _possible(spare, degrees, candidate.width):
            for at in range(len(recipes) + 1):
                if at == len(recipes) or recipes[at] != recipe:
                    yield _with(candidate, at, at, recipe)
    for at, recipe in enumerate(recipes):
        freed = Counter(spare)
        for member, count in recipe:
            freed[member.pool] += member.tp_degree * count
        for other in _possible(freed, degrees, candidate.width):
            if other != recipe:
                yield _with(candidate, at, at + 1, other)


def _with(candidate: Candidate, first: int, end: int, *recipes: Recipe) -> Candidate:
    return candidate._replace(recipes=(*candidate.recipes[:first], *recipes, *candidate.recipes[end:]))


def _possible(spare: Mapping[int, int], degrees: Mapping[int, Sequence[int]], width: int) -> Iterator[Recipe]:
    """Yield stages of one sort of replica, and of what is left of two kinds where neither is enough."""
    members = [Member(pool, degree) for pool, found in degrees.items() for degree in found if spare[pool] >= degree]
    rooms = {member: spare[member.pool] // member.tp_degree for member in members}
    for member, room in rooms.items():
        if room >= width:
            yield ((member, width),)
            continue
        for other in members if len(members) <= _MOST_MIXED else ():
            if other.pool != member.pool and room + rooms[other] >= width and room >= 1:
                yield ((member, room), (other, width - room))
