"""What no plan can be under: compute, memory and links, each as if it could be divided at will (a relaxation).

A device that does n samples of a unit takes at least `fixed + n * slope` for it, the line under the measured seconds
that begins at one sample. It begins when the stages before its own have passed on a sample. If a stage s with work w(s)
gets none of it done in o(s) of the step T, devices of one speed are at least the sum of w(s) / (T - o(s)), which by
convexity is at least W / (T - O), O the mean of o weighted by w; and O is least if any two units are apart or together
as costs less. Kinds that differ are added up with weights by unit, those of the seconds of each kind in turn:
multipliers of a linear programme's dual, so each of them gives a bound.

Devices of several sites: either two sites hold all units, and then all gradients come into and out of each; or all
sites but one lack a unit, and then each sample that they work on comes in and goes out over a cut. A site's links count
as if all of them could be used at once, and nothing is said of the order of work, of messages and sums that nothing
hides, or of samples that do not divide evenly.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from functools import cached_property

import numpy as np

from spantrain.core.action import SPLIT_OPS, Op
from spantrain.core.records import Record
from spantrain.cost.memory import framework_bytes
from spantrain.cost.span_tables import Array
from spantrain.planner.request import Objective, PlanRequest
from spantrain.planner.strategies.score import weights_of

_HALVINGS = 50
_EVERY_PAIR_UP_TO = 64
"""Sites up to which only the links among them count; of more, those to all sites."""
_NOTHING = 1e-15


class StepBound(Record):
    """The least that a step can take, with parts of the reason."""

    value: float
    """Of the objective: seconds or US dollars of a step, joules of a sample."""
    step_s: float
    compute_s: float
    """If devices of all sites were in one place."""
    alone_s: float
    """The best that the devices of one site can do."""


class Relaxation:
    """Least seconds of a step on the devices of a request, or on those of some of their sites.

    Raises:
        ProfileError: the profile lacks a timing of a kind.
    """

    def __init__(self, request: PlanRequest, *, offloads: bool = False) -> None:
        """`offloads`: whether a host of which nobody says how much memory it has is taken to have enough."""
        self._profile, self._job, self._objective = request.profile, request.job, request.objective
        self._spans, cluster = request.job.span_tables(request.profile), request.profile.cluster
        devices = self._devices = [cluster.device_by_name[name] for name in request.devices_within_quotas]
        kinds = Counter(device.make for device in devices)
        self._kinds = {key: number for number, key in enumerate(kinds)}
        self._sites = {site: number for number, site in enumerate(dict.fromkeys(device.site for device in devices))}
        self._counts = np.zeros((len(self._sites), len(kinds)))
        for device in devices:
            self._counts[self._sites[device.site], self._kinds[device.make]] += 1
        self._state_bytes = self._spans.memory.state_bytes(range(self._spans.units))
        enough = math.inf if offloads else 0
        roomy = {host.name for host in cluster.hosts if (host.memory_bytes or enough) >= self._state_bytes}
        self._offload = {d.site for d in devices if d.host in roomy and not cluster.kind_by_name[d.kind].unified_memory}
        """Sites with a host that has room for all state."""
        lines = [self._line(kind) for kind, _, _ in kinds]
        self._slope, fixed = (np.array(rows) for rows in zip(*lines, strict=True))
        # The members of a tensor-parallel group share what does not depend on samples.
        self._fixed = fixed.min(axis=0) * (not request.dividing)
        self._passes_s = np.min([self._seconds(kind, 1, Op.FORWARD) for kind, _, _ in kinds], axis=0)
        formats = request.constraints.wire_formats
        cuts = [min(min(u.forward_bytes(f), u.backward_bytes(f)) for f in formats) for u in self._profile.graph.units]
        self._cut_bytes = float(min(cuts[:-1], default=0))

    def bound(self) -> StepBound:
        """Return the least that any plan can take, and cost."""
        everywhere, alone = tuple(self._sites), min(map(self.alone_s, self._sites))
        joined = self.joined_s(everywhere) if len(everywhere) > 1 else math.inf
        compute_s = self._compute_s(self._counts.sum(axis=0), everywhere)
        step_s = min(alone, joined)
        value = step_s if self._objective is Objective.THROUGHPUT else self._least_work()
        return StepBound(value=value, step_s=step_s, compute_s=compute_s, alone_s=alone)

    def _least_work(self) -> float:
        """Return what all work comes to in the objective's own unit, each unit on the kind that suits it best."""
        weights = weights_of(self._profile.cluster, self._objective, self._job.global_batch)
        each = {device.make: device.name for device in self._devices}
        rates = [weights.second_by_device[name] + weights.busy_by_device[name] for name in each.values()]
        return self._job.global_batch * float((self._slope * np.array(rates)[:, None]).min(axis=0).sum())

    def alone_s(self, site: str) -> float:
        """Return the least that the devices of a site can take."""
        return self._compute_s(self._counts[self._sites[site]], [site])

    def joined_s(self, sites: Sequence[str]) -> float:
        """Return the least of a plan that uses devices of at least two of these sites."""
        rows = [self._sites[site] for site in sites]
        rates = self._rates(rows)
        together_s = self._compute_s(self._counts[rows].sum(axis=0), sites)
        copied_s = max(together_s, float(self._profile.graph.trained_bytes / max(np.sort(rates)[-2], _NOTHING)))
        if not self._cut_bytes or not copied_s > together_s:
            return together_s
        low_s, high_s = together_s, copied_s
        for _ in range(_HALVINGS):
            step_s = (low_s + high_s) / 2
            low_s, high_s = (low_s, step_s) if self._crosses_in(rows, rates, step_s) else (step_s, high_s)
        return low_s

    def _crosses_in(self, rows: Sequence[int], rates: Array, step_s: float) -> bool:
        """Whether all samples can be done in so long if only one site need not get each of its own over a cut."""
        limits = rates * step_s / self._cut_bytes / self._job.global_batch
        for power, _ in self._powers:
            does = self._counts[rows] @ power * step_s
            let_in = np.minimum(does, limits)
            if let_in.sum() + (does - let_in).max() < 1:
                return False
        return True

    @cached_property
    def _powers(self) -> list[tuple[Array, float]]:
        """By weights of units: the part of all work that a second of each kind does at most, and the idle seconds."""
        found = []
        for weights in self._slope:
            used, total = weights > 0, float(weights.sum())
            if used.any():
                most = (weights[used] / np.maximum(self._slope[:, used], _NOTHING)).max(axis=1)
                found.append((most / (total * self._job.global_batch), self._idle_s(weights / total)))
        return found

    def _idle_s(self, parts: Array) -> float:
        """Return the least mean seconds in which a device gets no samples done, by each unit's part of the work."""
        apart = self._passes_s[:, None] * parts[None, :]
        one_way = self._fixed[:, None] * parts[None, :]
        pairs = np.triu(np.minimum(apart, one_way + one_way.T), 1)
        return float(np.trace(one_way) + pairs.sum())

    def _compute_s(self, counts: Array, sites: Collection[str]) -> float:
        """Return the least seconds of so many devices of each kind, all in one place but for the memory of hosts."""
        if not (self._fits(counts) or self._offload.intersection(sites)):
            return math.inf
        least = [idle_s + 1 / float(counts @ power) for power, idle_s in self._powers]
        return max([float(self._passes_s.sum()), *least])

    def _fits(self, counts: Array) -> bool:
        """Whether all memory together holds parameters, gradients and optimizer state once."""
        room = sum(
            counts[number] * max(0, memory - framework_bytes(backend))
            for (_, memory, backend), number in self._kinds.items()
        )
        return bool(room >= self._state_bytes)

    def _line(self, kind: str) -> tuple[Array, Array]:
        """Return by unit the slope and the fixed seconds of a line under those of any number of samples."""
        most = self._job.global_batch
        measured = {timing.samples for timing in self._profile.timings if timing.kind == kind}
        sizes = sorted({1, most, *(size for size in measured if size < most)})
        rows = np.array([self._seconds(kind, size, *SPLIT_OPS) for size in sizes])
        count = np.array(sizes, dtype=np.float64)[:, None]
        slope = rows[0] if most == 1 else ((rows[1:] - rows[0]) / (count[1:] - 1)).min(axis=0)
        # Where one sample takes less than each further one, the line begins at none.
        slope = np.where(slope > rows[0], (rows / count).min(axis=0), np.maximum(slope, 0.0))
        return slope, np.maximum((rows - slope * count).min(axis=0), 0.0)

    def _seconds(self, kind: str, samples: int, *ops: Op) -> Array:
        return np.diff(np.sum([self._spans.compute.prefix_seconds(kind, op, samples) for op in ops], axis=0))

    def _rates(self, rows: Sequence[int]) -> Array:
        """Return the bytes per second that each of some sites can send and receive at most, the less of the two."""
        if len(rows) > _EVERY_PAIR_UP_TO:
            return np.minimum(*self._to_all)[rows]
        names = tuple(self._sites)
        found = []
        for row in rows:
            here, others = names[row], [names[other] for other in rows if other != row]
            out = sum((self._between(here, other) for other in others), 0.0)
            into = sum((self._between(other, here) for other in others), 0.0)
            found.append(min(out, into, *self._lines(here)))
        return np.array(found)

    @cached_property
    def _to_all(self) -> tuple[Array, Array]:
        """By site, bytes per second to all other sites, and from all of them."""
        cluster = self._profile.cluster
        rates, named = np.zeros((2, len(self._sites))), np.zeros((2, len(self._sites)))
        for link in cluster.links:
            for row, site in enumerate((link.source, link.target)):
                if site in self._sites:
                    rates[row, self._sites[site]] += self._between(link.source, link.target)
                    named[row, self._sites[site]] += 1
        if cluster.default_link is not None:
            rates += (len(cluster.sites) - 1 - named) * cluster.default_link.bandwidth_bytes_per_s
        lines = np.array([self._lines(site) for site in self._sites]).T
        return np.minimum(rates[0], lines[0]), np.minimum(rates[1], lines[1])

    def _between(self, source: str, target: str) -> float:
        measured = self._profile.fastest_pairs.get(((source,), (target,)), 0.0)
        return max(measured, self._profile.cluster.link_between(source, target).bandwidth_bytes_per_s)

    def _lines(self, site: str) -> tuple[float, float]:
        """Return what a site's lines to and from all others carry."""
        found = self._profile.cluster.site_by_name[site]
        lines = (found.uplink_bandwidth_bytes_per_s, found.downlink_bandwidth_bytes_per_s)
        # What was measured through a line may be more than it is said to carry.
        up, down = (math.inf if rate is None or self._profile.links else rate for rate in lines)
        return up, down
