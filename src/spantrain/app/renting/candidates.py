"""Machines that could be rented together: as a cluster, and what they take and cost at least."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, groupby, permutations

import yaml

from spantrain.config.cluster_text import kind_text, rate_text
from spantrain.config.kinds import load_kinds
from spantrain.config.prices import PriceFile
from spantrain.core.cluster import DeviceKind
from spantrain.core.money.prices import KindPrice, Market, Offer, distance
from spantrain.core.records import Record
from spantrain.core.units import UnitGraph
from spantrain.cost.analytic import AnalyticLaw

MOST_DEVICES = 64
"""Of a candidate: with more, planning takes longer than people wait."""
_MARKETS = {Market.ON_DEMAND: "on demand", Market.SPOT: "spot", Market.OWNED: "owned"}


class Rented(Record):
    """Machines of one offer."""

    offer: Offer
    hosts: int
    market: Market

    @property
    def devices(self) -> int:
        """All of them together."""
        return self.hosts * self.offer.per_host

    @property
    def price(self) -> KindPrice:
        """Of one device."""
        return self.offer.prices[self.market]

    @property
    def what(self) -> str:
        """The machines, in words."""
        one = self.offer
        machines = f"{self.hosts} x {one.per_host} {one.kind}" if one.per_host > 1 else f"{self.hosts} {one.kind}"
        return f"{machines} {_MARKETS[self.market]} at {one.place}"


class Candidate(Record):
    """Machines that are rented together."""

    parts: tuple[Rented, ...]

    @property
    def what(self) -> str:
        """The machines, in words."""
        return " + ".join(part.what for part in self.parts)

    @property
    def shape(self) -> tuple[tuple[Offer, int], ...]:
        """What a plan depends on: how machines are had does not matter to it."""
        return tuple((part.offer, part.hosts) for part in self.parts)

    @property
    def devices(self) -> int:
        """All of them."""
        return sum(part.devices for part in self.parts)

    @property
    def is_one_node(self) -> bool:
        """Whether it is a single machine."""
        return sum(part.hosts for part in self.parts) == 1

    def usd_per_hour(self, kinds: Mapping[str, DeviceKind]) -> float:
        """Return what an hour of it costs; owned devices draw their power figure, an upper estimate."""
        return sum(
            part.devices * (part.price.usd_per_hour + part.price.usd_per_kwh * kinds[part.offer.kind].power_w / 1000)
            for part in self.parts
        )


def single_offers(offers: Sequence[Offer], quotas: Mapping[str, int]) -> Iterator[Candidate]:
    """Yield machines of one offer: one, then more of them; quotas are the most devices of a kind."""
    for offer in offers:
        most = min(offer.most, MOST_DEVICES, quotas.get(offer.kind, MOST_DEVICES)) // offer.per_host
        for hosts in _counts(most):
            for market in offer.prices:
                yield Candidate(parts=(Rented(offer=offer, hosts=hosts, market=market),))


def _counts(most: int) -> Iterator[int]:
    """Yield counts of machines to try, each about 1.4 times the one before.

    >>> list(_counts(20))
    [1, 2, 3, 4, 6, 8, 12, 16]
    """
    power = 1
    while power <= most:
        yield power
        if power > 1 and power * 3 // 2 <= most:
            yield power * 3 // 2
        power *= 2


def paired(candidates: Sequence[Candidate], quotas: Mapping[str, int]) -> Iterator[Candidate]:
    """Yield every two of these that stand in different places."""
    for one, other in combinations(candidates, 2):
        both = Candidate(parts=(*one.parts, *other.parts))
        apart = len({part.offer.place for part in both.parts}) == len(both.parts)
        within = all(
            sum(part.devices for part in both.parts if part.offer.kind == kind) <= most for kind, most in quotas.items()
        )
        if apart and within and both.devices <= MOST_DEVICES:
            yield both


def cluster_text(candidate: Candidate, prices: PriceFile) -> str:
    """Return the cluster file of these machines: sites with their prices, and the lines between them."""
    sites = [list(found) for _, found in groupby(candidate.parts, key=lambda part: part.offer.place)]
    kinds = dict.fromkeys(part.offer.kind for part in candidate.parts if part.offer.kind in prices.kinds)
    document: dict[str, object] = {
        "name": "to-rent",
        "description": f"{candidate.what}, by offers; nothing of it was measured",
    }
    if kinds:
        document["kinds"] = {name: kind_text(prices.kinds[name]) for name in kinds}
    document["sites"] = [_site(parts, prices) for parts in sites]
    if len(sites) > 1:
        document["links"] = [_link(a[0].offer, b[0].offer, prices) for a, b in permutations(sites, 2)]
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=110)


def _site(parts: Sequence[Rented], prices: PriceFile) -> dict[str, object]:
    first = parts[0].offer
    region = f"{first.provider}/{first.region}"
    egress = prices.table.egress_of(region)
    tiers = {
        far: [
            {"usd_per_gb": tier.usd_per_gb}
            | ({} if tier.up_to_bytes is None else {"up_to": f"{tier.up_to_bytes:.0f} B"})
            for tier in found
        ]
        for far, found in (("zone", egress.zone), ("region", egress.region), ("internet", egress.internet))
    }
    return {
        "name": first.place,
        "region": region,
        "network": {"bandwidth": rate_text(first.bandwidth_bytes_per_s), "latency": f"{first.latency_s:.9g} s"},
        "prices": {part.offer.kind: _price(part) for part in parts},
        "egress": tiers,
        "hosts": [
            {"name": f"{first.place}-{part.offer.kind}", "count": part.hosts}
            | ({"inside": part.offer.inside} if part.offer.inside else {})
            | {"devices": {part.offer.kind: part.offer.per_host}}
            for part in parts
        ],
    }


def _price(part: Rented) -> dict[str, float]:
    price = part.price
    usd = price.usd_per_kwh if part.market is Market.OWNED else price.usd_per_hour
    more = {"preemptions_per_hour": price.preemptions_per_hour} if part.market is Market.SPOT else {}
    return {part.market.value: usd, **more}


def _link(source: Offer, target: Offer, prices: PriceFile) -> dict[str, object]:
    far = distance(*(f"{one.provider}/{one.region}" for one in (source, target)))
    line = prices.table.lines[far]
    rate = min(line.bandwidth_bytes_per_s, source.bandwidth_bytes_per_s, target.bandwidth_bytes_per_s)
    return {
        "from": source.place,
        "to": target.place,
        "bandwidth": rate_text(rate),
        "latency": f"{line.latency_s:.9g} s",
    }


class LeastCosts:
    """What training takes and costs at least on some machines, by the kinds' data sheets."""

    def __init__(self, graph: UnitGraph, dtype: str, prices: PriceFile) -> None:
        self.kinds: dict[str, DeviceKind] = {**load_kinds(), **prices.kinds}
        self._device_s = cache(
            lambda kind: AnalyticLaw(kind=self.kinds[kind], speed=1.0, dtype=dtype).marginal_seconds(graph.units)
        )
        """What one more sample takes a device of a kind."""

    def sample_s(self, candidate: Candidate) -> float:
        """Return the least seconds of a sample: all devices compute all the time, on as many samples as they like."""
        return 1 / sum(part.devices / self._device_s(part.offer.kind) for part in candidate.parts)

    def sample_usd(self, candidate: Candidate) -> float:
        """Return the least US dollars of a sample: nothing is sent to another place."""
        return self.sample_s(candidate) / 3600 * candidate.usd_per_hour(self.kinds)
