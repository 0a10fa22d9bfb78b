"""Seconds of transfers between devices, and which transfers share a link."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spantrain.core.profile import LinkMeasurement, Profile
from spantrain.errors import ProfileError

__all__ = ["NetworkCost", "Path"]

DeviceShares = tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True)
class Path:
    """The way from the replicas of one stage to those of another, for bytes divided by their sample shares."""

    latency_s: float
    """Of the slowest pair that talks."""
    link_s_per_byte: Mapping[str, float]
    """By shared link: seconds that it is busy for one byte of the whole cut (all pairs that cross it together)."""

    @property
    def s_per_byte(self) -> float:
        """Seconds for one byte of the whole cut on the busiest link."""
        return max(self.link_s_per_byte.values(), default=0.0)

    def seconds(self, size_bytes: float) -> float:
        """Return the seconds from the first byte sent to the last byte there."""
        return self.latency_s + size_bytes * self.s_per_byte


class NetworkCost:
    """Seconds of transfers, from measurements between devices."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._paths: dict[tuple[DeviceShares, DeviceShares], Path] = {}

    def link(self, source: str, target: str) -> LinkMeasurement:
        """Return the measurement from one device to another.

        Raises:
            ProfileError: the pair was not measured.
        """
        found = self._profile.link_by_pair.get((source, target))
        if found is None:
            raise ProfileError(
                f"the profile has no measurement from {source} to {target}; measure the network of this cluster again"
            )
        return found

    def occupancy_seconds(self, source: str, target: str, size_bytes: float) -> float:
        """Return the seconds that a transfer keeps its link busy: bytes over bandwidth."""
        return 0.0 if source == target else size_bytes / self.link(source, target).bandwidth_bytes_per_s

    def transfer_seconds(self, source: str, target: str, size_bytes: float) -> float:
        """Return the seconds from sending to having received all: latency and occupancy."""
        if source == target:
            return 0.0
        return self.link(source, target).latency_s + self.occupancy_seconds(source, target, size_bytes)

    def shared_link(self, source: str, target: str) -> str:
        """Return the name of what the transfer shares with others.

        Between sites it is the directed pair of sites (`lab->office`): all devices share it. Inside a site it
        is the directed pair of hosts (`lab/a->lab/b`), inside a host the directed pair of devices.
        """
        a, b = (self._profile.cluster.device_by_name[name] for name in (source, target))
        if a.site != b.site:
            return f"{a.site}->{b.site}"
        if a.host != b.host:
            return f"{a.site}/{a.host}->{b.site}/{b.host}"
        return f"{a.site}/{a.host}/{source}->{b.site}/{b.host}/{target}"

    def all_reduce_seconds(self, devices: Sequence[str], size_bytes: float) -> float:
        """Return the seconds of a ring sum over devices (SpanTrain, Chinese paper, equation 5).

        The paper's 2 (k-1)/k · bytes / slowest bandwidth; the latency of the 2 (k-1) turns is added.
        """
        count = len(devices)
        if count < 2:
            return 0.0
        links = [self.link(a, b) for a in devices for b in devices if a != b]
        slowest = min(link.bandwidth_bytes_per_s for link in links)
        latency_s = max(link.latency_s for link in links)
        return 2 * (count - 1) * (size_bytes / count / slowest + latency_s)

    def path(self, senders: DeviceShares, receivers: DeviceShares) -> Path:
        """Return the way between two stages, given each replica's leader and sample share.

        Every replica takes one piece of each micro-batch, in order, so replica pairs talk where their
        intervals of shares overlap.
        """
        key = (senders, receivers)
        found = self._paths.get(key)
        if found is None:
            found = self._paths[key] = self._path(senders, receivers)
        return found

    def _path(self, senders: DeviceShares, receivers: DeviceShares) -> Path:
        busy: dict[str, float] = {}
        latency_s = 0.0
        for source, lo, hi in _intervals(senders):
            for target, other_lo, other_hi in _intervals(receivers):
                fraction = min(hi, other_hi) - max(lo, other_lo)
                if fraction <= 1e-9 or source == target:
                    continue
                name = self.shared_link(source, target)
                busy[name] = busy.get(name, 0.0) + self.occupancy_seconds(source, target, fraction)
                latency_s = max(latency_s, self.link(source, target).latency_s)
        return Path(latency_s=latency_s, link_s_per_byte=busy)


def _intervals(shares: DeviceShares) -> list[tuple[str, float, float]]:
    total = sum(share for _, share in shares)
    found, lo = [], 0.0
    for device, share in shares:
        found.append((device, lo, lo + share / total))
        lo += share / total
    return found
