"""What was measured: seconds of F, I and W, activations, links, scores; with provenance."""

import math
from bisect import bisect_left
from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise, permutations
from typing import Annotated

from spantrain.core.cluster import Cluster
from spantrain.core.records import Bounds, NotNegative, Positive, Record
from spantrain.core.units import ModelSpec, UnitGraph
from spantrain.formats.precision import check_dtype

_MEGABYTE = 1e6
_LOOKED_AT = 64
"""Sizes at which a fitted curve is checked to be above zero."""


Place = tuple[str, ...]


class UnitTiming(Record, where="{0.unit_class} on {0.kind}"):
    """Median seconds of one unit's work on one kind of device, for one number of samples."""

    unit_class: str
    kind: str
    dtype: str
    """One of `formats.precision`."""
    samples: Annotated[int, Bounds(low=1)]
    forward_s: NotNegative
    backward_input_s: NotNegative
    backward_weight_s: NotNegative
    tp_degree: Annotated[int, Bounds(low=1)] = 1
    source: str = "measured"
    """`measured` or `analytic`."""


class BandwidthPoint(Record, where="a point of a bandwidth curve"):
    """What one size of message was carried at."""

    size_bytes: Annotated[int, Bounds(low=1)]
    bandwidth_bytes_per_s: Positive


class BandwidthCurve(Record):
    """Bandwidth against the size of a message: measured points, or a fitted polynomial.

    Between two points the seconds are linear in the bytes, which is exact for a fixed cost and a rate. A polynomial is
    in x = log2(bytes / 1e6), as published measurements have it (Strati et al., Sailor, SOSP 2025, its artifact), for
    sizes from `least_bytes` to `most_bytes`. Outside the points or those sizes, the bandwidth of the nearest end holds.

    Raises:
        ValueError: there are both or neither; sizes do not rise; the polynomial is not positive over its sizes.

    >>> curve = BandwidthCurve(points=(BandwidthPoint(size_bytes=1000, bandwidth_bytes_per_s=500.0),
    ...                                BandwidthPoint(size_bytes=3000, bandwidth_bytes_per_s=750.0)))
    >>> curve.seconds(500), curve.seconds(2000), curve.seconds(6000)
    (1.0, 3.0, 8.0)
    """

    points: tuple[BandwidthPoint, ...] = ()
    """By rising size."""
    coefficients_bytes_per_s: tuple[float, ...] = ()
    """Coefficients of the powers of x, the highest first."""
    least_bytes: float | None = None
    """The smallest size that the polynomial was fitted to."""
    most_bytes: float | None = None

    def __post_init__(self) -> None:
        if bool(self.points) == bool(self.coefficients_bytes_per_s):
            raise ValueError("a bandwidth curve needs either points or coefficients_bytes_per_s")
        if any(b.size_bytes <= a.size_bytes for a, b in pairwise(self.points)):
            raise ValueError("a bandwidth curve's points must be by rising size, each size once")
        if self.coefficients_bytes_per_s:
            self._check_polynomial()

    def _check_polynomial(self) -> None:
        least, most = self.least_bytes, self.most_bytes
        if least is None or most is None or not 0 < least <= most < math.inf:
            raise ValueError(f"a fitted bandwidth curve needs 0 < least_bytes <= most_bytes, got {least} and {most}")
        for step in range(_LOOKED_AT + 1):
            size_bytes = least * (most / least) ** (step / _LOOKED_AT)
            if not 0 < self._fitted(size_bytes) < math.inf:
                raise ValueError(
                    f"a fitted bandwidth curve must be positive, it is {self._fitted(size_bytes):g} bytes/s for "
                    f"{size_bytes:g} bytes; narrow least_bytes ({least:g}) to most_bytes ({most:g})"
                )

    def bandwidth_bytes_per_s(self, size_bytes: float) -> float:
        """Return the bandwidth that a message of so many bytes gets."""
        if self.coefficients_bytes_per_s:
            assert self.least_bytes is not None
            assert self.most_bytes is not None
            return self._fitted(min(max(size_bytes, self.least_bytes), self.most_bytes))
        at = bisect_left(self.points, size_bytes, key=lambda point: point.size_bytes)
        if at == 0 or at == len(self.points):
            return self.points[min(at, len(self.points) - 1)].bandwidth_bytes_per_s
        a, b = self.points[at - 1], self.points[at]
        before_s, after_s = (point.size_bytes / point.bandwidth_bytes_per_s for point in (a, b))
        part = (size_bytes - a.size_bytes) / (b.size_bytes - a.size_bytes)
        return size_bytes / (before_s + part * (after_s - before_s))

    def seconds(self, size_bytes: float) -> float:
        """Return for how long a message of so many bytes keeps the link busy."""
        return size_bytes / self.bandwidth_bytes_per_s(size_bytes)

    def _fitted(self, size_bytes: float) -> float:
        x, found = math.log2(size_bytes / _MEGABYTE), 0.0
        for coefficient in self.coefficients_bytes_per_s:
            found = found * x + coefficient
        return found


class LinkMeasurement(Record, where="link {0.source} -> {0.target}"):
    """What one device can send to another."""

    source: str
    target: str
    latency_s: NotNegative
    """One way: half of the round trip of five int32."""
    bandwidth_bytes_per_s: Positive
    """Rate of a large payload, latency taken off."""
    payload_bytes: int
    rounds: int
    curve: BandwidthCurve | None = None
    """By size of message, where more than one was measured; None: the bandwidth above holds for all."""

    @classmethod
    def described(cls, cluster: Cluster, source: str, target: str) -> "LinkMeasurement":
        """Return what a cluster's description says of the way from one device to another: nobody measured it."""
        way = cluster.link(source, target)
        return cls(
            source=source,
            target=target,
            latency_s=way.latency_s,
            bandwidth_bytes_per_s=way.bandwidth_bytes_per_s,
            payload_bytes=0,
            rounds=0,
        )

    def busy_seconds(self, size_bytes: float) -> float:
        """Return for how long a message of so many bytes keeps the link busy: bytes over bandwidth."""
        if self.curve is None:
            return size_bytes / self.bandwidth_bytes_per_s
        return self.curve.seconds(size_bytes)


class DeviceScore(Record):
    """Compute capacity p_c = sum of w_i / t_i over small tasks (SpanTrain 3.2.1)."""

    device: str
    score: float
    task_s: Mapping[str, float]
    """Seconds of each task."""


class RuntimeCosts(Record):
    """What the runtime itself takes, measured in a rehearsal on the devices that train: `app.profiling.rehearsal`."""

    action_s: NotNegative
    """From the end of an action to the start of the next one, when nothing has to be waited for."""
    message_s: NotNegative
    """What a message takes besides its link: the software of both ends, until the action that needs it starts."""
    step_end_s: NotNegative
    """From the end of all work and sums of a step to the start of the next one's work: the barrier and the update."""


class Provenance(Record):
    """Where the numbers come from."""

    created: str
    """UTC, ISO 8601."""
    spantrain_version: str
    torch_version: str
    machine: str
    method: str
    compute_s: float
    """Seconds that measuring compute took."""
    network_s: float
    """Seconds that one round of measuring the network took."""


class Profile(Record):
    """Everything a planner needs."""

    cluster: Cluster
    model: ModelSpec
    graph: UnitGraph
    dtype: str
    timings: tuple[UnitTiming, ...]
    links: tuple[LinkMeasurement, ...]
    scores: tuple[DeviceScore, ...]
    provenance: Provenance
    links_described: bool = False
    """Whether pairs that are not among `links` have what the cluster's description says of them: nobody measured."""
    runtime: RuntimeCosts | None = None
    """None: nobody measured it; taken as nothing."""

    def __post_init__(self) -> None:
        check_dtype(self.dtype)

    @cached_property
    def link_by_pair(self) -> Mapping[tuple[str, str], LinkMeasurement]:
        """Links by (source, target) device; of all pairs, even where they are described (ask `link` for a few)."""
        pairs = permutations(self.cluster.device_by_name, 2)
        return {pair: link for pair in pairs if (link := self.link(*pair)) is not None}

    def link(self, source: str, target: str) -> LinkMeasurement | None:
        """Return what is known of the way from one device to another; None if that is nothing."""
        found = self._known_links.get((source, target))
        if found is None and self.links_described and source != target:
            found = self._known_links[source, target] = LinkMeasurement.described(self.cluster, source, target)
        return found

    @cached_property
    def _known_links(self) -> dict[tuple[str, str], LinkMeasurement]:
        return {(link.source, link.target): link for link in self.links}

    @cached_property
    def fastest_pairs(self) -> Mapping[tuple[Place, Place], float]:
        """The largest bandwidth measured between devices of two places, in bytes per second.

        A place is `(site, host)`, `(site,)`, or `()` for all other sites. There are: host to host; site to other site;
        host to its own site's other hosts and back; host to all other sites and back.
        """
        found: dict[tuple[Place, Place], float] = {}
        devices = self.cluster.device_by_name
        for link in self.links:
            a, b = devices[link.source], devices[link.target]
            if a.host == b.host:
                continue
            here: tuple[Place, Place] = ((a.site, a.host), (b.site, b.host))
            # From outside, a host of one's own site is seen as the site, one of another site as elsewhere.
            seen: tuple[Place, Place] = ((b.site,), (a.site,)) if a.site == b.site else ((), ())
            pairs = [here, (here[0], seen[0]), (seen[1], here[1])]
            if a.site != b.site:
                pairs.append(((a.site,), (b.site,)))
            for pair in pairs:
                found[pair] = max(link.bandwidth_bytes_per_s, found.get(pair, 0.0))
        return found

    @cached_property
    def score_by_device(self) -> Mapping[str, float]:
        """Compute capacity by device name."""
        return {entry.device: entry.score for entry in self.scores}

    @cached_property
    def timings_by_key(self) -> Mapping[tuple[str, str], tuple[UnitTiming, ...]]:
        """Timings by (unit class, device kind), by rising tensor-parallel degree and number of samples."""
        table: dict[tuple[str, str], list[UnitTiming]] = {}
        for timing in self.timings:
            table.setdefault((timing.unit_class, timing.kind), []).append(timing)
        return {key: tuple(sorted(entries, key=lambda t: (t.tp_degree, t.samples))) for key, entries in table.items()}
