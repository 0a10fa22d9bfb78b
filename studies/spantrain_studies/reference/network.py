"""Seconds of transfers and ring sums between replicas, from bandwidth that was measured between whole hosts."""

import math
from collections.abc import Sequence

from spantrain.errors import ProfileError
from spantrain_studies.reference.types import LinkCurve, Reference, ReferenceReplica

_UNIT_BYTES = 1e6
_BANDWIDTH_UNIT = 1e9
_CHUNK_BYTES = 4 * 2.0**20
"""A ring sum goes round in pieces that fit the collective library's buffers: NCCL's default (NCCL_BUFFSIZE), 4 MiB."""

Placed = tuple[ReferenceReplica, int]
"""A replica and the number of its host."""


def curve_bandwidth_bytes_per_s(curve: LinkCurve, size_bytes: float) -> float:
    """Return the bandwidth for a message; outside of what was measured, that of the nearest measured size.

    The polynomials were fitted from 1 MB up and bend down again behind their highest point, where they are cut off.
    """
    x = max(0.0, math.log2(max(size_bytes, 1.0) / _UNIT_BYTES))
    *_, bend, slope, _base = (0.0, 0.0, *curve.coefficients)
    if len(curve.coefficients) == 3 and bend < 0:
        x = min(x, -slope / (2 * bend)) if slope > 0 else x
    value = 0.0
    for coefficient in curve.coefficients:
        value = value * x + coefficient
    most = curve.max_bandwidth_bytes_per_s
    return min(max(value * _BANDWIDTH_UNIT, most / 100), most)


class ReferenceNetwork:
    """Seconds between replicas.

    Links were measured between two hosts, with so many devices of each sending at once; all devices of a host together
    get that bandwidth, since they share the host's network cards. The size in a curve is that of each device's own
    message: where every device has a card, n of them show n times the bandwidth of one at the same size.
    """

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._rows: dict[tuple[str, ...], dict[tuple[int, int], LinkCurve]] = {}
        for key, curve in reference.links.items():
            self._rows.setdefault((*key[:2], *key[3:5]), {})[key[2], key[5]] = curve
        self._known: dict[tuple[object, ...], LinkCurve] = {}

    def transfer_s(self, source: Placed, target: Placed, size_bytes: float) -> float:
        """Return the seconds of a message of which each device of the sending group carries an equal part.

        Raises:
            ProfileError: nothing was measured between such hosts.
        """
        if size_bytes == 0:
            return 0.0
        own_bytes = size_bytes / source[0].tp_degree
        return size_bytes / curve_bandwidth_bytes_per_s(self._curve(source, target), own_bytes)

    def gather_s(self, replica: ReferenceReplica, size_bytes: float) -> float:
        """Return the seconds until each device of a tensor-parallel group has all of what each has a part of.

        Raises:
            ProfileError: nothing was measured inside a host of that kind.
        """
        return self.transfer_s((replica, 0), (replica, 0), size_bytes) if replica.tp_degree > 1 else 0.0

    def ring_sum_s(self, ring: Sequence[Placed], size_bytes: float) -> float:
        """Return the seconds of a ring sum; every hop has to carry the same, so the slowest decides.

        `size_bytes` is of a whole replica: each device of a tensor-parallel group has a ring of its own for its part,
        and all of these rings pass the same network cards. A hop carries 2 (n-1)/n of it, in pieces.
        """
        count = len(ring)
        if count < 2 or size_bytes == 0:
            return 0.0
        around = ((ring[number], ring[(number + 1) % count]) for number in range(count))
        # Hops between different hosts are all alike, whatever the numbers of the hosts.
        hops = {((a, 0), (b, int(host != other))) for (a, host), (b, other) in around}
        piece = min(size_bytes / count / max(replica.tp_degree for replica, _ in ring), _CHUNK_BYTES)
        slowest = min(curve_bandwidth_bytes_per_s(self._curve(a, b), piece) for a, b in hops)
        return 2 * (count - 1) / count * size_bytes / slowest

    def _curve(self, source: Placed, target: Placed) -> LinkCurve:
        (a, host), (b, other) = source, target
        key = (a, b, host == other)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._find_curve(a, b, same_host=host == other)
        return found

    def _find_curve(self, a: ReferenceReplica, b: ReferenceReplica, *, same_host: bool) -> LinkCurve:
        if same_host and a.kind == b.kind:
            inside = {n: curve for (kind, n), curve in self._reference.inside.items() if kind == a.kind}
            if inside:
                return inside[min(inside)]
            raise ProfileError(f"network.json has no row under 'intra_node' for {a.kind}")
        rows = self._rows.get((a.zone, a.kind, b.zone, b.kind))
        wanted = tuple(min(r.tp_degree, self._reference.devices_per_host[r.kind]) for r in (a, b))
        if not rows:
            raise ProfileError(
                f"network.json has no row under 'inter_node' from {a.kind} in {a.zone} to {b.kind} in {b.zone}"
            )
        return rows[min(rows, key=lambda counts: (abs(counts[0] - wanted[0]) + abs(counts[1] - wanted[1]), counts))]
