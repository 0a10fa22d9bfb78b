"""Prices as the sites of a cluster have them: of kinds of device, and of bytes by how far they go."""

import math
from dataclasses import dataclass
from enum import StrEnum

_BYTES_PER_GB = 1e9


@dataclass(frozen=True, kw_only=True)
class KindPrice:
    """What a device of a kind costs at a site."""

    usd_per_hour: float = 0.0
    """More than nothing: it is rented, and what leaves its site is paid for."""
    usd_per_kwh: float = 0.0
    """Of an owned one, which costs its electricity; rents hold that."""
    preemptions_per_hour: float = 0.0
    """At a spot price: how often a machine is taken away."""

    def __post_init__(self) -> None:
        for name in ("usd_per_hour", "usd_per_kwh", "preemptions_per_hour"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

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


@dataclass(frozen=True, kw_only=True)
class EgressTier:
    """A price of bytes up to so many in all; None: of all others."""

    usd_per_gb: float
    up_to_bytes: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.usd_per_gb < math.inf or not 0 < (self.up_to_bytes or 1.0) < math.inf:
            raise ValueError(f"a tier has a price that is not negative and an end over 0, got {self}")


@dataclass(frozen=True, kw_only=True)
class Egress:
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
