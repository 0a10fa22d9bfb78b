"""What things cost: prices of devices, of bytes that leave a place, and offers of machines that could be rented."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from spantrain.core.money.prices import Distance, Egress, KindPrice


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


class Market(StrEnum):
    """How a machine is had."""

    ON_DEMAND = "on_demand"
    SPOT = "spot"
    """It may be taken away at any time."""
    OWNED = "owned"
    """It costs its electricity."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Machines of one kind that can be had in one place."""

    provider: str
    region: str
    zone: str = ""
    kind: str
    per_host: int
    """Devices of a machine; there are no smaller ones."""
    most: int
    """Devices that can be had in all."""
    prices: Mapping[Market, KindPrice] = field(hash=False)
    bandwidth_bytes_per_s: float
    """Of a machine's port, to others of the place."""
    latency_s: float
    inside: str = ""
    """What joins the devices of a machine, as a cluster file says it; empty: nothing is said."""
    source: str = ""
    """Whose price, and of when."""

    @property
    def place(self) -> str:
        """The name of the site that it is in."""
        return "-".join(part for part in (self.provider, self.region, self.zone) if part)


@dataclass(frozen=True, kw_only=True)
class Line:
    """What joins two places."""

    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, kw_only=True)
class PriceTable:
    """What things cost where a cluster file does not say it, and what could be rented."""

    rented_by_kind: Mapping[str, Price]
    """Prices of an hour of a device."""
    owned_kinds: frozenset[str]
    """Kinds that cost their electricity only."""
    electricity: Price | None
    """Price of a kilowatt-hour."""
    egress: Price
    """Price of a gigabyte (1e9 bytes) that leaves a rented place of a provider that is not among those below."""
    egress_by_provider: Mapping[str, Egress] = field(default_factory=dict)
    lines: Mapping[Distance, Line] = field(default_factory=dict)
    """Between places that are so far apart."""
    offers: tuple[Offer, ...] = ()

    def of(self, kind: str) -> KindPrice | None:
        """Return the price of a kind; None if it has none."""
        if kind in self.rented_by_kind:
            return KindPrice(usd_per_hour=self.rented_by_kind[kind].usd)
        if kind in self.owned_kinds and self.electricity is not None:
            return KindPrice(usd_per_kwh=self.electricity.usd)
        return None

    def egress_of(self, region: str) -> Egress:
        """Return the prices of what leaves a place in a region, written `provider/region`."""
        flat = Egress.flat(self.egress.usd)
        return self.egress_by_provider.get(region.partition("/")[0], flat)
