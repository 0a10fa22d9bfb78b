"""Prices: of the sites of a cluster file, and files of prices and offers (docs/prices.md); `prices.yaml` ships.

A file of prices stands in the place of the shipped one as a whole; what it does not say has no price, and is asked for
by name. Egress and lines between places are the shipped ones where a file has none.
"""

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from functools import cache, partial
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from spantrain.config.files.problems import Problems
from spantrain.config.files.text_files import read_text
from spantrain.config.files.yaml_fields import Field, parse_yaml
from spantrain.config.kinds import load_kinds, read_kind
from spantrain.core.cluster import MAX_DEVICES, Cluster, DeviceKind
from spantrain.core.money.prices import Distance, Egress, EgressTier, KindPrice, Line, Market, Offer, Price, PriceTable
from spantrain.core.names import is_name
from spantrain.core.quantities import parse_bandwidth, parse_bytes, parse_seconds
from spantrain.core.records import Record
from spantrain.errors import ConfigError

T = TypeVar("T")
_REMEDY = "name a file of prices or offers (docs/prices.md shows how to write one), or leave it out"
_INSIDE = {"nvlink": 300e9, "pcie": 16e9}
"""Bytes a second between two devices of a machine, each way: NVLink 3 (A100) and half of PCIe 4 x16, as in practice."""
_SOURCES = ("date", "source", "found")
_PLACE_LATENCY_S = 1e-4


class PriceFile(Record):
    """What a file of prices holds."""

    table: PriceTable
    kinds: Mapping[str, DeviceKind] = field(default_factory=dict)
    """Those that it adds to the ones that ship."""


@cache
def shipped_prices() -> PriceFile:
    """Return the list prices and offers that ship with the program."""
    text = (resources.files("spantrain.config") / "prices.yaml").read_text(encoding="utf-8")
    return parse_prices(text, source="prices.yaml", base=None)


def load_prices() -> PriceTable:
    """Return the list prices that ship with the program."""
    return shipped_prices().table


def read_prices(path: Path) -> PriceFile:
    """Read a file of prices.

    Raises:
        ConfigError: it is missing, or something in it is wrong; all of it is told at once, with the lines.
    """
    return parse_prices(read_text(path, remedy=_REMEDY), source=str(path), base=load_prices())


def with_prices(cluster: Cluster, table: PriceTable) -> Cluster:
    """Return a cluster whose sites have the prices of a table wherever they have none of their own.

    Raises:
        ConfigError: neither has a price of a kind that is there.
    """
    missing: dict[str, None] = {}
    sites = []
    for site in cluster.sites:
        prices = dict(site.prices)
        for kind in dict.fromkeys(device.kind for device in cluster.devices_at(site.name)):
            known = prices.get(kind) or table.of(kind)
            if known is None:
                missing[f"{kind} at {site.name}"] = None
            else:
                prices[kind] = known
        sites.append(replace(site, prices=prices, egress=site.egress or table.egress_of(site.region)))
    if missing:
        raise ConfigError(
            f"no price for {', '.join(missing)}: add the kind under `rented` (USD an hour) or `owned` of the file of "
            "prices, or under the site's `prices` in the cluster file"
        )
    return replace(cluster, sites=tuple(sites))


def parse_prices(text: str, *, source: str, base: PriceTable | None) -> PriceFile:
    """Read the text of a file of prices; `source` is its name in errors.

    `base` has egress and lines for a file that has none; without it there must be some.

    Raises:
        ConfigError: something in it is wrong; all of it is told at once.
    """
    problems = Problems(source)
    top = parse_yaml(text, problems).table(
        required=(), optional=("rented", "owned", "electricity", "egress", "lines", "kinds", "offers")
    )
    kinds = read_own_kinds(top["kinds"]) if "kinds" in top else {}
    known = {**load_kinds(), **kinds}
    rented = top["rented"].entries() if "rented" in top else {}
    owned = top["owned"].items() if "owned" in top else []
    electricity = _price(top["electricity"], "usd_per_kwh") if "electricity" in top else None
    if owned and electricity is None:
        top["owned"].problem("costs its electricity; give `electricity`, in USD a kWh")
    egress = top["egress"].entries() if "egress" in top else {}
    table = PriceTable(
        rented_by_kind=MappingProxyType({kind: _price(row, "usd_per_hour") for kind, row in rented.items()}),
        owned_kinds=frozenset(_kind_of(at, known) for at in owned),
        electricity=electricity,
        egress=_price(egress.pop("default"), "usd_per_gb") if base is None or "default" in egress else base.egress,
        egress_by_provider=MappingProxyType(
            {name: read_egress(at) for name, at in egress.items()} or (base.egress_by_provider if base else {})
        ),
        lines=_lines(top["lines"]) if base is None or "lines" in top else base.lines,
        offers=tuple(_offer(item, known) for item in top["offers"].items()) if "offers" in top else (),
    )
    for kind, at in rented.items():
        if kind not in known:
            at.problem(problems.unknown("device kind", kind, known))
    problems.check()
    return PriceFile(table=table, kinds=kinds)


def read_own_kinds(section: Field) -> dict[str, DeviceKind]:
    """Read the kinds of a file, besides those that ship."""
    found = {}
    for name, entry in section.entries().items():
        if name in load_kinds():
            entry.problem(f"kind {name!r} ships with the program; give yours another name")
            continue
        kind = _checked(entry, partial(read_kind, name, entry))
        if kind is not None:
            found[name] = kind
    return found


def _kind_of(at: Field, known: Mapping[str, DeviceKind]) -> str:
    """Return a kind that has a data sheet; any text, and a problem, where it has none."""
    kind = at.text() or ""
    if kind and kind not in known:
        at.problem(
            f"{at.problems.unknown('device kind', kind, known)} (nothing can be planned without its data sheet: add it "
            "under `kinds`, with peak_fp16, peak_fp32, memory, memory_bandwidth, power, source)"
        )
    return kind


def _price(at: Field, unit: str) -> Price:
    """Read a price: a number, or a table with where it is from."""
    row = at.table(required=(unit,), optional=_SOURCES) if at.is_table else {unit: at}
    usd = _usd(row[unit]) if unit in row else 0.0
    date, source, found = ((row[name].text() or "") if name in row else "" for name in _SOURCES)
    return Price(usd=usd, date=date or "undated", source=source or at.problems.source, found=found)


def _usd(at: Field) -> float:
    value = at.number()
    if value is not None and value < 0:
        at.problem(f"{value:g} USD is negative; give a price of 0 or more")
    return max(0.0, value or 0.0)


def _checked(at: Field, make: Callable[[], T]) -> T | None:
    """Return what a dataclass makes of values; None, and a problem, if it refuses them."""
    try:
        return make()
    except ValueError as reason:
        at.problem(str(reason))
        return None


def read_egress(at: Field) -> Egress:
    """Read prices of a gigabyte that leaves a site: one number for all, or by how far it goes."""
    nothing = Egress.flat(0.0)
    if not at.is_table:
        return Egress.flat(_usd(at))
    row = at.table(required=tuple(far.value for far in Distance), optional=_SOURCES)
    tiers = {far.value: _tiers(row[far.value]) for far in Distance if far.value in row}
    if len(tiers) < len(Distance):
        return nothing
    return _checked(at, lambda: Egress(**tiers)) or nothing


def _tiers(at: Field) -> tuple[EgressTier, ...]:
    if not at.is_list:
        return (EgressTier(usd_per_gb=_usd(at)),)
    found = []
    for item in at.items():
        row = item.table(required=("usd_per_gb",), optional=("up_to",))
        end = row["up_to"].quantity(parse_bytes) if "up_to" in row else None
        found.append(EgressTier(usd_per_gb=_usd(row["usd_per_gb"]) if "usd_per_gb" in row else 0.0, up_to_bytes=end))
    return tuple(found)


def _lines(at: Field) -> Mapping[Distance, Line]:
    found = {}
    for name, field_ in at.table(required=tuple(far.value for far in Distance)).items():
        row = field_.table(required=("bandwidth", "latency"))
        if len(row) == 2:
            found[Distance(name)] = Line(
                bandwidth_bytes_per_s=row["bandwidth"].quantity(parse_bandwidth),
                latency_s=row["latency"].quantity(parse_seconds, zero_allowed=True),
            )
    return MappingProxyType(found)


def read_kind_price(at: Field) -> KindPrice:
    """Read what a device costs at a site: USD an hour, or one of on_demand, spot (with preemptions) and owned."""
    if not at.is_table:
        return KindPrice(usd_per_hour=_usd(at))
    found = _markets(at.table(required=(), optional=(*(market.value for market in Market), "preemptions_per_hour")), at)
    if len(found) > 1:
        at.problem(f"a site has one price for a kind; keep one of {', '.join(found)}")
    return next(iter(found.values()), KindPrice())


def _markets(row: Mapping[str, Field], at: Field) -> dict[Market, KindPrice]:
    """Return the prices that an entry has, by how the machine is had; one at least, or it is a problem."""
    found = {}
    rate = _usd(row["preemptions_per_hour"]) if "preemptions_per_hour" in row else 0.0
    for market in Market:
        if market.value in row:
            usd = _usd(row[market.value])
            found[market] = KindPrice(
                usd_per_hour=0.0 if market is Market.OWNED else usd,
                usd_per_kwh=usd if market is Market.OWNED else 0.0,
                preemptions_per_hour=rate if market is Market.SPOT else 0.0,
            )
    if not found and at.is_table:
        at.problem("has no price; give on_demand or spot in USD an hour of one device, or owned in USD a kWh")
    if Market.SPOT in found and "preemptions_per_hour" not in row:
        at.problem("spot needs preemptions_per_hour: how often a machine is taken away, e.g. 0.05")
    if Market.SPOT not in found and "preemptions_per_hour" in row:
        row["preemptions_per_hour"].problem("goes with a spot price; remove it, or give `spot`")
    return found


def read_inside(at: Field) -> str:
    """Read what joins the devices of a machine: nvlink, pcie, none (its port) or a rate."""
    known = len(at.problems.entries)
    at.quantity(lambda text: inside_rate(text, 1.0) or 1.0)
    return (at.text() or "") if len(at.problems.entries) == known else ""


def inside_rate(inside: str, port_bytes_per_s: float) -> float | None:
    """Return the bytes a second that `read_inside` has read; None where nothing is said.

    Raises:
        ValueError: it is no such word or rate.
    """
    if inside in ("", "none"):
        return port_bytes_per_s if inside else None
    try:
        return _INSIDE.get(inside) or parse_bandwidth(inside)
    except ValueError as reason:
        raise ValueError(f"{reason}; or {', '.join(_INSIDE)} or none") from None


def _offer(item: Field, known: Mapping[str, DeviceKind]) -> Offer:
    row = item.table(
        required=("provider", "region", "kind", "per_host", "most", "network"),
        optional=(
            "zone", *(market.value for market in Market), "preemptions_per_hour", "inside", "latency", *_SOURCES
        ),
    )  # fmt: skip
    names = {key: row[key].name() if key in row else "" for key in ("provider", "region", "zone")}
    dated = ", ".join(row[key].text() or "" for key in ("source", "date") if key in row)
    per_host = row["per_host"].count(most=64) if "per_host" in row else 1
    most = row["most"].count(most=MAX_DEVICES) if "most" in row else per_host
    if most < per_host:
        row["most"].problem(f"a machine has {per_host} devices (per_host), and only {most} can be had: give {per_host}")
    offer = Offer(
        **names,
        kind=_kind_of(row["kind"], known) if "kind" in row else "",
        per_host=per_host,
        most=most,
        prices=_markets(row, item),
        bandwidth_bytes_per_s=row["network"].quantity(parse_bandwidth) if "network" in row else 1.0,
        latency_s=row["latency"].quantity(parse_seconds, zero_allowed=True) if "latency" in row else _PLACE_LATENCY_S,
        inside=read_inside(row["inside"]) if "inside" in row else "",
        source=dated,
    )
    longest = f"{offer.place}-{offer.kind}-63-gpu63"
    if offer.place and offer.kind and not is_name(longest):
        item.problem(f"its devices would be named {longest!r}, which is too long; shorten provider, region or zone")
    return offer
