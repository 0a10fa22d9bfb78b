"""Money and energy of a step.

Money is for hours of rented devices, electricity of owned ones, and bytes that leave rented places. The prices are list
prices with a date and a source each, and where they were found, in `prices.yaml` beside this file.

Energy is of devices that work and that wait, and of the network between sites.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType

import yaml

from spantrain.core.cluster import Cluster

_JOULES_PER_KWH = 3.6e6
_BYTES_PER_GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Price:
    """A list price."""

    usd: float
    date: str
    """Year and month in which it was the list price."""
    source: str
    """What it is the price of, and whose."""
    found: str = ""
    """Where it was read; that says how far to trust it."""

    def __post_init__(self) -> None:
        if self.usd < 0 or not self.date or not self.source:
            raise ValueError(f"a price must not be negative and needs a date and a source, got {self}")


@dataclass(frozen=True, kw_only=True)
class PriceTable:
    """What things cost."""

    rented_by_kind: Mapping[str, Price]
    """Prices of an hour of a device."""
    owned_kinds: frozenset[str]
    """Kinds that cost their electricity only."""
    electricity: Price
    """Price of a kilowatt-hour."""
    egress: Price
    """Price of a gigabyte (1e9 bytes) that leaves a site with rented devices."""

    def has(self, kind: str) -> bool:
        """Whether a kind has a price."""
        return kind in self.rented_by_kind or kind in self.owned_kinds


@dataclass(frozen=True, kw_only=True)
class Money:
    """What a step costs, in US dollars by the list prices."""

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


@cache
def load_prices() -> PriceTable:
    """Return the list prices that ship with the program."""
    text = (resources.files("spantrain.cost") / "prices.yaml").read_text(encoding="utf-8")
    rows = yaml.safe_load(text)
    return PriceTable(
        rented_by_kind=MappingProxyType({kind: _price(row, "usd_per_hour") for kind, row in rows["rented"].items()}),
        owned_kinds=frozenset(rows["owned"]),
        electricity=_price(rows["electricity"], "usd_per_kwh"),
        egress=_price(rows["egress"], "usd_per_gb"),
    )


def _price(row: Mapping[str, object], unit: str) -> Price:
    return Price(usd=float(str(row[unit])), date=str(row["date"]), source=str(row["source"]), found=str(row["found"]))


def money_of_step(
    cluster: Cluster,
    step_s: float,
    *,
    joules_by_device: Mapping[str, float],
    sent_bytes: Mapping[tuple[str, str], int],
    prices: PriceTable | None = None,
) -> Money:
    """Return what a step costs on the devices of `joules_by_device`, which are in use for all of it.

    `sent_bytes` is by sender and receiver. A site with a rented device in use pays for what leaves it.
    """
    table = load_prices() if prices is None else prices
    devices = [cluster.device_by_name[name] for name in joules_by_device]
    rented_sites = {device.site for device in devices if device.kind in table.rented_by_kind}
    kwh = sum(joules_by_device[device.name] for device in devices if device.kind in table.owned_kinds) / _JOULES_PER_KWH
    rent = sum(table.rented_by_kind[device.kind].usd for device in devices if device.kind in table.rented_by_kind)
    left = sum(size for (source, _), size in between_sites(cluster, sent_bytes) if source in rented_sites)
    return Money(
        rent_usd=rent * step_s / 3600,
        electricity_usd=kwh * table.electricity.usd,
        egress_usd=left / _BYTES_PER_GB * table.egress.usd,
        without_price=tuple(device.name for device in devices if not table.has(device.kind)),
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


@dataclass(frozen=True, kw_only=True)
class Energy:
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
