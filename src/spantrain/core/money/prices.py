"""Prices: of kinds of device as sites have them, of bytes by how far they go, and of machines that could be rented."""

import math
from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from typing import Annotated

from spantrain.core.records import Bounds, NotNegative, Record

_BYTES_PER_GB = 1e9


class KindPrice(Record):
    """What a device of a kind costs at a site."""

    usd_per_hour: NotNegative = 0.0
    """More than nothing: it is rented, and what leaves its site is paid for."""
    usd_per_kwh: NotNegative = 0.0
    """Of an owned one, which costs its electricity; rents hold that."""
    preemptions_per_hour: NotNegative = 0.0
    """At a spot price: how often a machine is taken away."""

    @property
    def is_rented(self) -> bool:
        """Whether it is paid for by the hour."""
        return self.usd_per_hour > 0


class Distance(StrEnum):
    """How far apart two sites are, as providers charge for it."""

    ZONE = "zone"
    """Two zones of one region."""
    REGION = "region"
    """Two regions of one provider."""
    INTERNET = "internet"
    """Two providers, or nobody says."""


def distance(region: str, other: str) -> Distance:
    """Return how far apart sites in two regions are; regions are written `provider/region`, empty: nobody says.

    >>> distance("aws/us-east-1", "aws/us-east-1"), distance("aws/us-east-1", "aws/eu-west-1"), distance("", "")
    (<Distance.ZONE: 'zone'>, <Distance.REGION: 'region'>, <Distance.INTERNET: 'internet'>)
    """
    if region and region == other:
        return Distance.ZONE
    (provider, slash, _), theirs = region.partition("/"), other.partition("/")[0]
    return Distance.REGION if slash and provider == theirs else Distance.INTERNET


class EgressTier(Record, where="a tier"):
    """A price of bytes up to so many in all; None: of all others."""

    usd_per_gb: NotNegative
    up_to_bytes: Annotated[float | None, Bounds(over=0)] = None


class Egress(Record):
    """Prices of what leaves a site for others; inside a site nothing is paid."""

    zone: tuple[EgressTier, ...]
    region: tuple[EgressTier, ...]
    internet: tuple[EgressTier, ...]

    def __post_init__(self) -> None:
        for name in Distance:
            ends = [tier.up_to_bytes for tier in self.tiers(name)]
            known = [end for end in ends if end is not None]
            if not ends or None in ends[:-1] or known != sorted(set(known)):
                raise ValueError(f"{name}: tiers rise, and only the last one may have no end, got {ends}")

    @staticmethod
    def flat(usd_per_gb: float) -> "Egress":
        """Return one price for all."""
        tiers = (EgressTier(usd_per_gb=usd_per_gb),)
        return Egress(zone=tiers, region=tiers, internet=tiers)

    def tiers(self, far: Distance) -> tuple[EgressTier, ...]:
        """Return the tiers for a distance."""
        return {Distance.ZONE: self.zone, Distance.REGION: self.region, Distance.INTERNET: self.internet}[far]

    def usd_per_byte(self, far: Distance) -> float:
        """Return the price of the first bytes."""
        return self.tiers(far)[0].usd_per_gb / _BYTES_PER_GB

    def usd(self, far: Distance, size_bytes: float) -> float:
        """Return what so many bytes cost in all, tier by tier; beyond the last end its price holds.

        >>> steps = (EgressTier(usd_per_gb=0.1, up_to_bytes=10e9), EgressTier(usd_per_gb=0.05))
        >>> Egress(zone=steps, region=steps, internet=steps).usd(Distance.ZONE, 30e9)
        2.0
        """
        total, begin = 0.0, 0.0
        tiers = self.tiers(far)
        for tier in tiers:
            end = math.inf if tier is tiers[-1] or tier.up_to_bytes is None else tier.up_to_bytes
            total += max(0.0, min(size_bytes, end) - begin) * tier.usd_per_gb / _BYTES_PER_GB
            begin = end
        return total


class Price(Record):
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


class Offer(Record):
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


class Line(Record):
    """What joins two places."""

    bandwidth_bytes_per_s: float
    latency_s: float


class PriceTable(Record):
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
