"""Files of prices and offers, and prices in cluster files: what they mean, and what is wrong, told with its line."""

import pytest

from spantrain.config.cluster_file import parse_cluster
from spantrain.config.kinds import load_kinds
from spantrain.config.prices import load_prices, parse_prices, read_prices, shipped_prices, with_prices
from spantrain.core.money.prices import Distance, KindPrice, Market
from spantrain.errors import ConfigError

OFFERS = """
egress:
  mine: {zone: 0.01, region: 0.02, internet: [{up_to: 1 TB, usd_per_gb: 0.1}, {usd_per_gb: 0.05}]}
offers:
  - {provider: mine, region: east, kind: a100, per_host: 8, most: 16, on_demand: 2.5, spot: 1.0,
     preemptions_per_hour: 0.1, inside: nvlink, network: 100 Gbit/s, date: 2026-10, source: my contract}
  - {provider: lab, region: cellar, kind: big, per_host: 2, most: 2, owned: 0.3, network: 10 Gbit/s, latency: 1 ms}
kinds:
  big: {peak_fp16: 1 PFLOPS, peak_fp32: 90 TFLOPS, memory: 96 GiB, memory_bandwidth: 4 GB/s, power: 8 W, source: me}
"""
CLUSTER = """
name: c
sites:
  - name: a
    region: aws/us-east-1
    prices: {t4: {spot: 0.2, preemptions_per_hour: 0.1}, p4: 0.5}
    egress: {zone: 0.01, region: 0.02, internet: 0.09}
    quotas: {t4: 3}
    network: {bandwidth: 1 Gbit/s, latency: 0.1 ms}
    hosts:
      - {name: a, count: 2, inside: nvlink, devices: {t4: 2, p4: 1}}
  - name: b
    network: {bandwidth: 100 Mbit/s, latency: 0 s}
    hosts:
      - {name: b, inside: none, devices: {jetson-nano: 2}}
links:
  - {between: [a, b], bandwidth: 50 Mbit/s, latency: 20 ms}
"""


def _told(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_prices(text, source="o.yaml", base=load_prices())
    return str(caught.value)


def test_what_an_offers_file_means():
    found = parse_prices(OFFERS, source="o.yaml", base=load_prices())
    cloud, lab = found.table.offers
    assert (cloud.place, cloud.per_host, cloud.most) == ("mine-east", 8, 16)
    assert cloud.prices[Market.ON_DEMAND] == KindPrice(usd_per_hour=2.5)
    assert cloud.prices[Market.SPOT] == KindPrice(usd_per_hour=1.0, preemptions_per_hour=0.1)
    assert lab.prices == {Market.OWNED: KindPrice(usd_per_kwh=0.3)}
    assert lab.latency_s == 1e-3
    assert found.kinds["big"].power_w == 8
    assert found.table.egress_of("mine/east").usd(Distance.INTERNET, 3e12) == pytest.approx(100 + 100)
    # What it does not say of lines is what ships.
    assert found.table.lines == load_prices().lines


def test_every_shipped_offer_can_be_planned_for_and_is_dated():
    shipped = shipped_prices()
    assert len(shipped.table.offers) > 20
    assert {offer.kind for offer in shipped.table.offers} <= set(load_kinds())
    assert all("20" in offer.source for offer in shipped.table.offers)
    assert {offer.provider for offer in shipped.table.offers} == set(shipped.table.egress_by_provider)
    assert set(shipped.table.lines) == set(Distance)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("on_demand: 2.5, spot", "on_demand: -2.5, spot", "line 5, offers[0].on_demand: -2.5 USD is negative"),
        ("kind: a100", "kind: a100x", "line 5, offers[0].kind: unknown device kind 'a100x'; did you mean 'a100' or"),
        ("kind: a100", "kind: a100x", "add it under `kinds`"),
        ("most: 16", "most: 4", "offers[0].most: a machine has 8 devices (per_host), and only 4 can be had: give 8"),
        ("     preemptions_per_hour: 0.1,", "     ", "spot needs preemptions_per_hour"),
        ("owned: 0.3, ", "", "line 7, offers[1]: has no price; give on_demand or spot"),
        ("inside: nvlink", "inside: fast", "offers[0].inside: 'fast' needs a number and one of"),
        ("per_host: 8", "per_hosts: 8", "offers[0].per_hosts: unknown key 'per_hosts'; did you mean 'per_host'?"),
        ("{usd_per_gb: 0.05}", "{up_to: 1 GB, usd_per_gb: 0.05}", "internet: tiers rise"),
        ("kinds:\n  big", "kinds:\n  a100", "kind 'a100' ships with the program"),
    ],
)
def test_a_bad_line_is_told_with_its_number_and_what_to_do(old, new, says):
    assert OFFERS.count(old) == 1
    told = _told(OFFERS.replace(old, new))
    assert told.startswith("o.yaml: ")
    assert says in told


def test_a_file_of_prices_needs_electricity_for_what_is_owned(tmp_path):
    assert "give `electricity`" in _told("owned: [tx2]")
    with pytest.raises(ConfigError, match=r"none\.yaml: there is no such file"):
        read_prices(tmp_path / "none.yaml")


def test_a_cluster_file_has_regions_prices_egress_quotas_and_what_is_inside_hosts():
    cluster = parse_cluster(CLUSTER, source="c.yaml")
    site = cluster.site_by_name["a"]
    assert site.region == "aws/us-east-1"
    assert site.prices["t4"] == KindPrice(usd_per_hour=0.2, preemptions_per_hour=0.1)
    assert site.prices["p4"] == KindPrice(usd_per_hour=0.5)
    assert site.quotas == {"t4": 3}
    assert cluster.link("a-0-gpu0", "a-0-gpu1").bandwidth_bytes_per_s == 300e9
    # `none`: what its port lets through.
    assert cluster.link("b-gpu0", "b-gpu1").bandwidth_bytes_per_s == 100e6 / 8


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("quotas: {t4: 3}", "quotas: {t4: 5}", "quotas: 5 t4 are more than the site has (4)"),
        ("p4: 0.5}", "p5: 0.5}", "prices.p5: unknown device kind 'p5'"),
        (
            "{spot: 0.2, p",
            "{on_demand: 1, spot: 0.2, p",
            "a site has one price for a kind; keep one of on_demand, spot",
        ),
        ("internet: 0.09}", "internet: x}", "egress.internet: 'x' is not a number"),
        ("inside: none", "inside: nothing", "inside: 'nothing' needs a number"),
    ],
)
def test_bad_money_in_a_cluster_file_is_told(old, new, says):
    with pytest.raises(ConfigError) as caught:
        parse_cluster(CLUSTER.replace(old, new), source="c.yaml")
    assert says in str(caught.value)


def test_a_file_of_prices_fills_in_what_sites_do_not_say_and_what_neither_says_is_asked_for():
    cluster = parse_cluster(CLUSTER, source="c.yaml")
    table = parse_prices("rented: {t4: 9, jetson-nano: 0.01}", source="p.yaml", base=load_prices()).table
    found = with_prices(cluster, table)
    assert found.site_by_name["a"].prices == cluster.site_by_name["a"].prices
    assert found.site_by_name["b"].prices == {"jetson-nano": KindPrice(usd_per_hour=0.01)}
    lacking = parse_prices("rented: {t4: 9}", source="p.yaml", base=load_prices()).table
    with pytest.raises(ConfigError, match="no price for jetson-nano at b: add the kind under `rented`"):
        with_prices(cluster, lacking)
