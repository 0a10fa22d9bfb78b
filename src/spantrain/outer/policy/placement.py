"""At which place the shards should be, given how fast each cluster reaches it and how often it does.

Di-PS, 3.1 (the cost model for where servers are deployed). Kept: a matrix of bandwidths from each place to each
cluster, a vector of the clusters' throughputs, and that clusters exchange as often as their throughput says. Not
kept: the paper's choice, the place whose sum of bandwidth times throughput is largest. A place with one very fast
link wins by it, however long the others then take; here the place wins where all clusters together spend the least time
in exchanges. The paper's figure is given beside it. Decided here: shards may be at several places; then a cluster moves
the parts of different places at once, each over its own link, but all through its own line.
"""

import math
from collections.abc import Mapping

from spantrain.core.records import Record


class OuterPlaces(Record):
    """What is known of places and clusters."""

    throughput: Mapping[str, float]
    """By cluster: tokens per second."""
    line_bytes_per_s: Mapping[str, float]
    """By cluster: its own line, whatever place it talks to; a cluster that is missing has no such limit."""
    bandwidth_bytes_per_s: Mapping[str, Mapping[str, float]]
    """By place, then by cluster."""
    memory_bytes: Mapping[str, int]
    """By place: what its shards may hold; a place that is missing has no limit."""


class PlacementRequest(Record):
    """What is to be placed, and where it may be."""

    places: OuterPlaces
    shard_bytes: Mapping[str, int]
    """By shard: its parameters, moved up and down once in an exchange."""
    bytes_held_per_byte: float = 5.5
    """What a shard holds for each byte of its parameters."""
    bytes_pushed_per_byte: float = 1.0
    """What goes up in an exchange for each byte of parameters that comes down: less where pushes are rounded."""

    def __post_init__(self) -> None:
        known = self.places
        if not known.bandwidth_bytes_per_s or not known.throughput or not self.shard_bytes:
            raise ValueError("placement needs places, clusters and shards; one of them is empty")
        for place, row in known.bandwidth_bytes_per_s.items():
            if row.keys() != known.throughput.keys():
                raise ValueError(
                    f"place {place}: needs a bandwidth to each of {', '.join(sorted(known.throughput))}, "
                    f"got {', '.join(sorted(row)) or 'none'}"
                )
        rates = [*known.throughput.values(), *known.line_bytes_per_s.values()]
        rates += [rate for row in known.bandwidth_bytes_per_s.values() for rate in row.values()]
        rates += [self.bytes_held_per_byte, self.bytes_pushed_per_byte]
        if not all(0 < rate < math.inf for rate in rates) or min(self.shard_bytes.values()) < 1:
            raise ValueError("bandwidths, lines, throughputs and bytes must be positive and finite")


class PlaceScore(Record):
    """One place, if all shards were there."""

    place: str
    exchange_s: Mapping[str, float]
    """By cluster: seconds of a push and a pull."""
    weighted_s: float
    """Mean of these, by throughput."""
    paper_score: float
    """Sum of bandwidth times throughput: the paper's figure, larger is better."""
    fits: bool
    """Whether it has the memory."""


class ShardPlacement(Record):
    """Where each shard goes, and why."""

    places: Mapping[str, str]
    """By shard."""
    exchange_s: Mapping[str, float]
    """By cluster."""
    weighted_s: float
    single: tuple[PlaceScore, ...]
    """Each place by itself, best first."""
    reason: str


def place_shards(request: PlacementRequest) -> ShardPlacement:
    """Return the best single place, or several where that is at least a twentieth faster or no single one has room.

    Several are found by giving out shards from the largest, each where it adds least.

    Raises:
        ValueError: the places together have not enough memory.

    >>> known = OuterPlaces(
    ...     bandwidth_bytes_per_s={"x": {"a": 900e6, "b": 5e6}, "y": {"a": 100e6, "b": 100e6}},
    ...     throughput={"a": 1.0, "b": 1.0}, line_bytes_per_s={}, memory_bytes={})
    >>> best = place_shards(PlacementRequest(places=known, shard_bytes={"s0": 10**8}))
    >>> best.places, [score.place for score in best.single], [score.paper_score for score in best.single]
    ({'s0': 'y'}, ['y', 'x'], [200000000.0, 905000000.0])
    """
    scores = (_score(request, place) for place in request.places.bandwidth_bytes_per_s)
    single = tuple(sorted(scores, key=lambda score: (not score.fits, score.weighted_s, score.place)))
    spread = _spread(request)
    best = next((score for score in single if score.fits), None)
    if best is None and spread is None:
        raise ValueError(
            f"shards hold {request.bytes_held_per_byte * sum(request.shard_bytes.values()):.3g} bytes, more than there "
            "is room for; give more places, more memory, or smaller shards"
        )
    if spread is None or (best is not None and _weighted(request, spread) > 0.95 * best.weighted_s):
        assert best is not None
        spread = dict.fromkeys(request.shard_bytes, best.place)
        reason = f"clusters spend {best.weighted_s:.3g} s in an exchange, weighted by throughput"
        reason += f"; at {single[1].place} {single[1].weighted_s:.3g} s" if len(single) > 1 else ""
    else:
        alone = f"{best.weighted_s:.3g} s at {best.place} alone" if best else "no place alone has room"
        reason = f"clusters spend {_weighted(request, spread):.3g} s in an exchange, weighted by throughput; {alone}"
    return ShardPlacement(
        places=dict(sorted(spread.items())),
        exchange_s=_exchange_s(request, spread),
        weighted_s=_weighted(request, spread),
        single=single,
        reason=reason,
    )


def _score(request: PlacementRequest, place: str) -> PlaceScore:
    places = dict.fromkeys(request.shard_bytes, place)
    row = request.places.bandwidth_bytes_per_s[place]
    return PlaceScore(
        place=place,
        exchange_s=_exchange_s(request, places),
        weighted_s=_weighted(request, places),
        paper_score=sum(row[cluster] * rate for cluster, rate in request.places.throughput.items()),
        fits=_fits(request, places),
    )


def _spread(request: PlacementRequest) -> dict[str, str] | None:
    """Give out shards one by one; None where one has no room anywhere."""
    places: dict[str, str] = {}
    for shard in sorted(request.shard_bytes, key=lambda name: (-request.shard_bytes[name], name)):
        choices = ({**places, shard: place} for place in sorted(request.places.bandwidth_bytes_per_s))
        tried = [choice for choice in choices if _fits(request, choice)]
        if not tried:
            return None
        places = min(tried, key=lambda choice: _weighted(request, choice))
    return places


def _fits(request: PlacementRequest, places: Mapping[str, str]) -> bool:
    held = dict.fromkeys(places.values(), 0.0)
    for shard, place in places.items():
        held[place] += request.bytes_held_per_byte * request.shard_bytes[shard]
    return all(size <= request.places.memory_bytes.get(place, math.inf) for place, size in held.items())


def _exchange_s(request: PlacementRequest, places: Mapping[str, str]) -> dict[str, float]:
    """Return, by cluster, the seconds in which a copy goes up and one comes down."""
    known, sizes = request.places, dict.fromkeys(places.values(), 0)
    for shard, place in places.items():
        sizes[place] += request.shard_bytes[shard]
    seconds = {}
    for cluster in sorted(known.throughput):
        links = (size / known.bandwidth_bytes_per_s[place][cluster] for place, size in sizes.items())
        line_s = sum(sizes.values()) / known.line_bytes_per_s.get(cluster, math.inf)
        seconds[cluster] = (1 + request.bytes_pushed_per_byte) * max(line_s, *links)
    return seconds


def _weighted(request: PlacementRequest, places: Mapping[str, str]) -> float:
    throughput = request.places.throughput
    seconds = _exchange_s(request, places)
    return math.fsum(throughput[name] * seconds[name] for name in seconds) / math.fsum(throughput.values())
