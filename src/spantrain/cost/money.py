"""Money and energy of a step.

Money is for hours of rented devices, electricity of owned ones, and bytes that leave rented places: by the prices of
the cluster's sites, else by a table (`config.prices` reads the one that ships). A step's bytes are at the first tier's
price; what a whole run sends is not known here.

Energy is of devices that work and that wait, and of the network between sites.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from spantrain.core.cluster import Cluster, Device
from spantrain.core.money.prices import Distance, Egress, KindPrice, PriceTable, distance
from spantrain.core.records import Record

_JOULES_PER_KWH = 3.6e6


class Prices:
    """What a cluster's devices and bytes cost: as its sites say, else as a table has it."""

    def __init__(self, cluster: Cluster, table: PriceTable) -> None:
        self._cluster, self._table = cluster, table

    def of(self, device: Device) -> KindPrice | None:
        """Return the price of a device; None if it has none."""
        return self._cluster.site_by_name[device.site].prices.get(device.kind) or self._table.of(device.kind)

    def egress(self, source: str, target: str) -> tuple[Egress, Distance]:
        """Return the prices of what leaves one site for another, and how far that is."""
        region, other = (self._cluster.site_by_name[site].region for site in (source, target))
        return self._cluster.site_by_name[source].egress or self._table.egress_of(region), distance(region, other)

    def usd_per_byte(self, source: str, target: str) -> float:
        """Return the price of the first bytes from one site to another."""
        egress, far = self.egress(source, target)
        return egress.usd_per_byte(far)

    def lacking(self, devices: Iterable[Device]) -> tuple[str, ...]:
        """Return which of these have no price, and the field of the cluster file that would give it one."""
        rows = Counter((device.kind, device.site) for device in devices if self.of(device) is None)
        return tuple(
            f"{count} {kind} at {site} (the site's `prices: {{{kind}: USD an hour}}`)"
            for (kind, site), count in rows.items()
        )


class Money(Record):
    """What a step costs, in US dollars."""

    rent_usd: float
    electricity_usd: float
    """Electricity of owned devices; rents hold that of the others."""
    egress_usd: float
    without_price: tuple[str, ...]
    """Devices whose kind has no price: they are left out of the sums above."""

    @property
    def total_usd(self) -> float | None:
        """All of it; None where a device has no price."""
        return None if self.without_price else self.rent_usd + self.electricity_usd + self.egress_usd


def usd_per_second(price: KindPrice, power_w: float) -> tuple[float, float]:
    """Return what a second costs of a device that waits, and how much more of one that works."""
    usd_per_j = price.usd_per_kwh / _JOULES_PER_KWH
    idle_w = IDLE_POWER_RATIO * power_w
    return price.usd_per_hour / 3600 + idle_w * usd_per_j, (power_w - idle_w) * usd_per_j


def money_of_step(
    cluster: Cluster,
    step_s: float,
    *,
    joules_by_device: Mapping[str, float],
    sent_bytes: Mapping[tuple[str, str], int],
    prices: PriceTable,
) -> Money:
    """Return what a step costs on the devices of `joules_by_device`, which are in use for all of it.

    `sent_bytes` is by sender and receiver. A site with a rented device in use pays for what leaves it.
    """
    known = Prices(cluster, prices)
    found = {name: known.of(cluster.device_by_name[name]) for name in joules_by_device}
    priced = {name: price for name, price in found.items() if price is not None}
    paying = {cluster.device_by_name[name].site for name, price in priced.items() if price.is_rented}
    egress = sum(
        size * known.usd_per_byte(source, target)
        for (source, target), size in between_sites(cluster, sent_bytes)
        if source in paying
    )
    return Money(
        rent_usd=sum(price.usd_per_hour for price in priced.values()) * step_s / 3600,
        electricity_usd=sum(joules_by_device[name] * price.usd_per_kwh for name, price in priced.items())
        / _JOULES_PER_KWH,
        egress_usd=egress,
        without_price=tuple(name for name, price in found.items() if price is None),
    )


def between_sites(cluster: Cluster, sent_bytes: Mapping[tuple[str, str], int]) -> list[tuple[tuple[str, str], int]]:
    """Return the bytes that go from one site to another, by pair of sites; pairs may come more than once."""
    site = {device.name: device.site for device in cluster.devices}
    routes = (((site[source], site[target]), size) for (source, target), size in sent_bytes.items())
    return [(pair, size) for pair, size in routes if pair[0] != pair[1]]


IDLE_POWER_RATIO = 0.2
"""Power of a device that waits inside a step, as a part of its kind's power figure.

A round assumption, not a measurement: data-centre accelerators with a loaded program draw 50-120 W of 300-700 W while
they wait, boards 2-4 W of 10-15 W.
"""

NETWORK_J_PER_BYTE = 1.35e-5
"""Energy of one byte between sites.

Aslan, Mayers, Koomey, France, "Electricity Intensity of Internet Data Transmission" (2018): 0.06 kWh/GB in 2015 for
fixed lines, halving every two years; carried on to 2023 that is 0.00375 kWh/GB. The decline after 2015 is assumed.
Networks inside a site are not counted.
"""


class Energy(Record):
    """Joules of a step."""

    by_device: Mapping[str, float]
    network_j: float

    @property
    def total_j(self) -> float:
        """All of it."""
        return sum(self.by_device.values()) + self.network_j


def energy_of_step(
    cluster: Cluster, step_s: float, *, busy_s: Mapping[str, float], sent_bytes: Mapping[tuple[str, str], int]
) -> Energy:
    """Return the energy of a step in which each device of `busy_s` works for so long and waits for the rest.

    A device that works draws its kind's power figure, which is a limit that makers give: an upper estimate.
    """
    by_device = {}
    for name, seconds in busy_s.items():
        power_w = cluster.kind_by_name[cluster.device_by_name[name].kind].power_w
        by_device[name] = power_w * (seconds + IDLE_POWER_RATIO * max(0.0, step_s - seconds))
    crossed = sum(size for _, size in between_sites(cluster, sent_bytes))
    return Energy(by_device=by_device, network_j=crossed * NETWORK_J_PER_BYTE)
