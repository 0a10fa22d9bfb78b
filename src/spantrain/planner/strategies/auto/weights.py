"""What an objective counts, as weights: value = per_step + per_second * seconds + busy seconds and bytes, weighted.

Time, money and energy (`cost.money`, `cost.energy`) are all of this form for a given set of devices, with weights that
are not negative. So whatever bounds the seconds from below bounds the value from below.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from spantrain.core.cluster import Cluster, Device
from spantrain.cost.energy import IDLE_POWER_RATIO, NETWORK_J_PER_BYTE
from spantrain.cost.money import PriceTable, load_prices
from spantrain.planner.request import Objective

_JOULES_PER_KWH = 3.6e6
_BYTES_PER_GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights of one objective on one cluster."""

    second: float
    """Of a second of the step, whatever is used."""
    second_by_device: Mapping[str, float]
    """Of a second of the step for each device in use."""
    busy_by_device: Mapping[str, float]
    """Of a second in which the device computes."""
    byte_by_pair: Mapping[tuple[str, str], float]
    """Of a byte from one site to another."""
    site_by_device: Mapping[str, str]

    @cached_property
    def counts_traffic(self) -> bool:
        """Whether bytes between sites count."""
        return any(self.byte_by_pair.values())

    @cached_property
    def counts_more(self) -> bool:
        """Whether anything but the seconds of the step counts."""
        return any(any(own.values()) for own in (self.second_by_device, self.busy_by_device, self.byte_by_pair))

    def per_byte(self, source: str, target: str) -> float:
        """Return the weight of a byte from a device to another."""
        return self.byte_by_pair.get((self.site_by_device[source], self.site_by_device[target]), 0.0)

    def per_second(self, devices: Iterable[str]) -> float:
        """Return the weight of a second of the step when these devices are used."""
        if not self.counts_more:
            return self.second
        return self.second + sum(self.second_by_device[name] for name in devices)


def weights_of(cluster: Cluster, objective: Objective, global_batch: int) -> Weights:
    """Return the weights of an objective; infinite where a device has no price."""
    second, busy = {}, {}
    prices = load_prices() if objective is Objective.COST else None
    for device in cluster.devices:
        second[device.name], busy[device.name] = _of_device(cluster, device, prices, objective, global_batch)
    pairs = {}
    for a in cluster.sites:
        for b in cluster.sites:
            if a.name != b.name:
                pairs[a.name, b.name] = _of_byte(cluster, a.name, prices, objective, global_batch)
    return Weights(
        second=1.0 if objective is Objective.THROUGHPUT else 0.0,
        second_by_device=second,
        busy_by_device=busy,
        byte_by_pair=pairs,
        site_by_device={device.name: device.site for device in cluster.devices},
    )


def _of_device(
    cluster: Cluster, device: Device, prices: PriceTable | None, objective: Objective, global_batch: int
) -> tuple[float, float]:
    """Return the weights of a second in use and of a busy second."""
    power_w = cluster.kind_by_name[device.kind].power_w
    idle, work = IDLE_POWER_RATIO * power_w, (1 - IDLE_POWER_RATIO) * power_w
    if objective is Objective.ENERGY:
        return idle / global_batch, work / global_batch
    if prices is None:
        return 0.0, 0.0
    if device.kind in prices.rented_by_kind:
        return prices.rented_by_kind[device.kind].usd / 3600, 0.0
    if device.kind in prices.owned_kinds:
        usd_per_j = prices.electricity.usd / _JOULES_PER_KWH
        return idle * usd_per_j, work * usd_per_j
    return float("inf"), 0.0


def _of_byte(
    cluster: Cluster, source: str, prices: PriceTable | None, objective: Objective, global_batch: int
) -> float:
    """Return the weight of a byte that leaves a site; of money, only where everything there is rented.

    A site pays egress once one of its rented devices is in use, which is certain only if it has no others.
    """
    if objective is Objective.ENERGY:
        return NETWORK_J_PER_BYTE / global_batch
    if prices is None:
        return 0.0
    rented = all(device.kind in prices.rented_by_kind for device in cluster.devices_at(source))
    return prices.egress.usd / _BYTES_PER_GB if rented else 0.0
