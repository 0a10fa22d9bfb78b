"""Money and energy of a step, by hand."""

from dataclasses import replace
from types import MappingProxyType

import pytest

from spantrain.config.kinds import load_kinds
from spantrain.config.prices import load_prices
from spantrain.core.money.prices import Egress, EgressTier, KindPrice, Price, PriceTable
from spantrain.cost.money import IDLE_POWER_RATIO, NETWORK_J_PER_BYTE, between_sites, energy_of_step, money_of_step

SENT = {("a0", "a1"): 5_000, ("a0", "b0"): 2_000_000_000, ("b0", "a0"): 1_000_000_000}


@pytest.fixture
def table() -> PriceTable:
    def price(usd: float) -> Price:
        return Price(usd=usd, date="2020-01", source="made up")

    return PriceTable(
        rented_by_kind=MappingProxyType({"fast": price(7.2)}),
        owned_kinds=frozenset({"slow"}),
        electricity=price(0.36),
        egress=price(0.1),
    )


def test_rent_electricity_and_egress(cost_cluster, table) -> None:
    joules = {"a0": 1e9, "a1": 1e9, "b0": 1e7}
    money = money_of_step(cost_cluster, 0.5, joules_by_device=joules, sent_bytes=SENT, prices=table)
    assert money.rent_usd == pytest.approx(2 * 7.2 * 0.5 / 3600)
    assert money.electricity_usd == pytest.approx(1e7 / 3.6e6 * 0.36)
    # What leaves the owned place costs nothing.
    assert money.egress_usd == pytest.approx(2 * 0.1)
    assert money.total_usd == pytest.approx(0.002 + 1.0 + 0.2)


def test_what_has_no_price_says_so(cost_cluster, table) -> None:
    none_owned = replace(table, owned_kinds=frozenset())
    money = money_of_step(cost_cluster, 1.0, joules_by_device={"a0": 1.0, "b0": 1.0}, sent_bytes={}, prices=none_owned)
    assert money.without_price == ("b0",)
    assert money.total_usd is None
    assert money.rent_usd > 0


def test_sites_say_their_own_prices_and_how_far_apart_they_are(cost_cluster, table) -> None:
    """Two zones of one region, at the price between zones; a spot price beside the table's."""
    steps = (EgressTier(usd_per_gb=0.5, up_to_bytes=1e9), EgressTier(usd_per_gb=0.25))
    own = Egress(zone=(EgressTier(usd_per_gb=0.01),), region=(EgressTier(usd_per_gb=0.02),), internet=steps)
    near, far = cost_cluster.sites

    def at(region: str) -> float:
        sites = (
            replace(near, region="aws/east", egress=own, prices={"fast": KindPrice(usd_per_hour=3.6)}),
            replace(far, region=region),
        )
        money = money_of_step(
            replace(cost_cluster, sites=sites), 1.0, joules_by_device={"a0": 0.0}, sent_bytes=SENT, prices=table
        )
        assert money.rent_usd == pytest.approx(0.001)
        return money.egress_usd

    assert at("aws/east") == pytest.approx(2 * 0.01)
    assert at("aws/west") == pytest.approx(2 * 0.02)
    assert at("gcp/east") == at("") == pytest.approx(2 * 0.5)


def test_a_place_whose_devices_are_not_used_pays_nothing(cost_cluster, table) -> None:
    money = money_of_step(cost_cluster, 1.0, joules_by_device={"b0": 0.0}, sent_bytes=SENT, prices=table)
    assert money.total_usd == 0


def test_every_shipped_price_is_dated_and_every_shipped_kind_has_one() -> None:
    prices = load_prices()
    assert prices.electricity is not None
    for price in (*prices.rented_by_kind.values(), prices.electricity, prices.egress):
        assert price.usd > 0
        year, month = map(int, price.date.split("-"))
        assert 2020 <= year <= 2026
        assert 1 <= month <= 12
        assert len(price.source) > 10
        assert len(price.found) > 10
    assert [kind for kind in load_kinds() if prices.of(kind) is None] == []
    assert not prices.owned_kinds & set(prices.rented_by_kind)


def test_a_price_without_a_source_is_refused() -> None:
    with pytest.raises(ValueError, match="source"):
        Price(usd=1.0, date="2024-01", source="")


def test_busy_and_idle_power_and_the_network(cost_cluster) -> None:
    energy = energy_of_step(cost_cluster, 4.0, busy_s={"a0": 1.0, "b0": 4.0}, sent_bytes=SENT)
    assert energy.by_device == {"a0": pytest.approx(10 * (1 + 3 * IDLE_POWER_RATIO)), "b0": pytest.approx(40)}
    assert energy.network_j == pytest.approx(3e9 * NETWORK_J_PER_BYTE)
    assert energy.total_j == pytest.approx(sum(energy.by_device.values()) + energy.network_j)


def test_bytes_between_sites_leave_out_those_inside(cost_cluster) -> None:
    assert between_sites(cost_cluster, SENT) == [(("near", "far"), 2_000_000_000), (("far", "near"), 1_000_000_000)]
