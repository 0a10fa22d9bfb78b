"""What to rent: what is chosen, what it is shown beside, what spot machines lose, what is refused."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from spantrain.app.profiling.describe import described_profile
from spantrain.app.renting.candidates import Candidate, LeastCosts, Rented, cluster_text, paired, single_offers
from spantrain.app.renting.choice import RentGoal, _against
from spantrain.app.renting.picture import draw_frontier, write_plot
from spantrain.app.renting.search import CHECKPOINT_S, REPLACED_S, RentRequest, loss_of_host_s, rent
from spantrain.config.cluster_file import parse_cluster
from spantrain.config.prices import load_prices, parse_prices, shipped_prices
from spantrain.core.money.prices import Market
from spantrain.errors import ConfigError, InfeasiblePlanError, PlanError
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.evaluate import Evaluator, link_loads
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.request import Constraints, JobSpec, Quota
from spantrain.planner.strategies.registry import strategies

MODEL = resolve_model("gpt2-tiny")
JOB = JobSpec(global_batch=32)
OFFERS = """
egress: {fast: 0.1, cheap: 0.1, spare: {zone: 0, region: 0, internet: 0.2}}
offers:
  - {provider: fast, region: east, kind: h100, per_host: 4, most: 8, on_demand: 8, inside: nvlink, network: 100 Gbit/s}
  - {provider: cheap, region: east, kind: t4, per_host: 1, most: 4, on_demand: 0.4, spot: 0.1,
     preemptions_per_hour: 0.2, network: 10 Gbit/s}
  - {provider: spare, region: west, kind: p100, per_host: 1, most: 1, on_demand: 2, network: 10 Gbit/s}
"""


def prices(text=OFFERS):
    return parse_prices(text, source="o.yaml", base=load_prices())


def goal_of(**goal):
    return RentGoal(**({"unit": "tokens", "per_sample": MODEL.sequence_length, "amount": 1e9} | goal))


def asked(text=OFFERS, constraints=None, **goal):
    return RentRequest(
        model=MODEL, job=JOB, prices=prices(text), goal=goal_of(**goal), dtype="float32",
        options=PlanOptions(constraints=constraints or Constraints()),
    )  # fmt: skip


@pytest.fixture(scope="module")
def cheapest():
    return rent(asked())


def test_the_frontier_falls_in_time_as_it_rises_in_money(cheapest):
    rows = cheapest.frontier
    assert len(rows) >= 2
    assert [row.usd for row in rows] == sorted(row.usd for row in rows)
    assert [row.hours for row in rows] == sorted((row.hours for row in rows), reverse=True)
    assert cheapest.chosen == rows[0]
    assert cheapest.one_node is not None
    assert cheapest.one_node.candidate.is_one_node
    assert cheapest.reasons()[0].startswith("One good node alone")


def test_each_limit_is_kept_and_what_it_leaves_is_the_best(cheapest):
    slow, fast = cheapest.frontier[0], cheapest.frontier[-1]
    usd, hours = (slow.usd * fast.usd) ** 0.5, (slow.hours * fast.hours) ** 0.5
    by_money, by_time = rent(asked(budget_usd=usd)).chosen, goal_of(deadline_h=hours).best(cheapest.frontier)
    assert by_money.usd <= usd
    assert by_money.hours <= 1.03 * min(row.hours for row in cheapest.frontier if row.usd <= usd)
    assert by_time.hours <= hours
    assert by_time.usd == min(row.usd for row in cheapest.frontier if row.hours <= hours)
    speed = goal_of(amount=None, min_samples_per_s=by_time.samples_per_s).best(cheapest.frontier)
    assert speed == by_time
    same = next(row for row in cheapest.frontier if row.candidate == by_money.candidate)
    price = goal_of(amount=None, usd_per_million=same.usd_per_million).best(cheapest.frontier)
    assert price.usd_per_million <= same.usd_per_million
    assert price.samples_per_s == pytest.approx(same.samples_per_s, rel=0.03)


def test_the_choice_has_the_figures_of_the_plan_that_comes_with_it(cheapest):
    row = cheapest.chosen
    assert row.plan == cheapest.in_full.plan
    assert row.step_s == pytest.approx(cheapest.in_full.step_s_predicted)
    assert row in cheapest.frontier
    assert row.hours * 3600 * (1 - row.lost_ratio) == pytest.approx(
        cheapest.goal.samples / JOB.global_batch * cheapest.in_full.step_s_predicted
    )


def test_a_limit_that_the_full_plan_alone_keeps_is_kept(cheapest):
    quick, full = cheapest.frontier[-1], rent(asked(budget_usd=1e4)).chosen
    assert full.candidate == quick.candidate
    assert full.hours < 0.99 * quick.hours
    assert rent(asked(deadline_h=1.005 * full.hours)).chosen == full
    with pytest.raises(InfeasiblePlanError, match=f"it would take --deadline '{full.hours * 1.005:.4g} h'"):
        rent(asked(deadline_h=0.995 * full.hours))


FREE = """
offers:
  - {provider: uni, region: lab, kind: t4, per_host: 1, most: 2, on_demand: 0, network: 10 Gbit/s}
"""


def test_machines_that_cost_nothing_are_compared_and_drawn():
    found = rent(asked(FREE, deadline_h=1000.0))
    fastest = rent(asked(FREE, budget_usd=1.0))
    assert fastest.chosen.usd == found.chosen.usd == 0
    assert fastest.chosen.candidate.devices > 1
    assert "as much money" in fastest.reasons()[0]
    ElementTree.fromstring(draw_frontier(fastest))
    paid = next(line for line in OFFERS.splitlines(keepends=True) if "h100" in line)
    mixed = rent(asked(FREE + paid, deadline_h=0.9 * fastest.chosen.hours))
    assert mixed.chosen.usd > 0
    ElementTree.fromstring(draw_frontier(mixed))


def test_what_money_compares_to_where_one_side_is_free():
    assert _against(0.0, 2.0, "money") == "no money"
    assert _against(2.0, 0.0, "money") == "money where that takes none"
    assert _against(0.0, 0.0, "money") == "as much money"


@pytest.mark.parametrize(
    ("asked_for", "says"),
    [
        ({"leave_out": ("fst",)}, "--leave-out fst: nothing of that name is on offer; did you mean 'fast'?"),
        (
            {"quotas": (Quota(kind="t44", count=1),)},
            "--quota t44: nothing of that name is on offer; did you mean 't4'?",
        ),
        (
            {"quotas": (Quota(kind="t4", site="cheap", count=1),)},
            "--quota cheap: nothing of that name is on offer; did",
        ),
    ],
)
def test_names_that_are_not_on_offer_are_refused(asked_for, says):
    with pytest.raises(PlanError, match=re.escape(says)):
        rent(asked(constraints=Constraints(**asked_for)))


def test_of_several_quotas_the_least_holds():
    quotas = tuple(Quota(kind="t4", count=count, site=site) for site in (None, "cheap-east") for count in (1, 4))
    found = rent(asked(constraints=Constraints(leave_out=("fast", "spare"), quotas=quotas)))
    assert {row.candidate.devices for row in found.frontier} == {1}


def test_machines_that_are_taken_too_often_are_no_question_of_memory():
    text = """
offers:
  - {provider: p, region: r, kind: t4, per_host: 1, most: 1, spot: 0.1, preemptions_per_hour: 500, network: 1 Gbit/s}
"""
    with pytest.raises(InfeasiblePlanError, match=r"1 t4 spot at p-r would lose 9\d\.\d% of its time to preemptions"):
        rent(asked(text))


def test_owned_places_pay_no_egress():
    text = BOARDS.replace(
        "region: b, kind: jetson-nano, per_host: 1, most: 1, on_demand: 0.1",
        "region: b, kind: jetson-nano, per_host: 1, most: 1, owned: 0.2",
    )
    found = rent(replace(asked(text), model=resolve_model("gpt2-medium"), job=JobSpec(global_batch=8)))
    assert {part.offer.place for part in found.chosen.candidate.parts} == {"lab-a", "home-b"}
    sizes = {name: load.size_bytes for name, load in link_loads(found.chosen.plan, found.profile).items()}
    assert found.chosen.egress_usd == pytest.approx(0.1 * sizes["lab-a->home-b"] / 1e9 * found.goal.samples / 8)


def test_a_kind_of_the_file_is_in_the_cluster_as_it_is():
    text = """
kinds:
  board: {peak_fp16: 1.3 TFLOP/s, peak_fp32: 0.7 TFLOP/s, memory: 8 GiB, memory_bandwidth: 59.7 GB/s, power: 15 W,
    source: me, unified_memory: true}
offers:
  - {provider: p, region: r, kind: board, per_host: 1, most: 1, owned: 0.1, network: 1 Gbit/s}
"""
    found = prices(text)
    (candidate,) = single_offers(found.table.offers, {})
    cluster = parse_cluster(cluster_text(candidate, found), source="rented")
    assert cluster.kind_by_name["board"] == found.kinds["board"]


def test_places_whose_devices_would_have_too_long_names_are_refused_with_their_line():
    text = OFFERS.replace("provider: spare", f"provider: {'spare' * 10}")
    with pytest.raises(ConfigError, match=r"o.yaml: line 7, offers\[2\]: its devices would be named .* too long"):
        prices(text)


@pytest.mark.parametrize(
    ("goal", "says"),
    [
        ({"budget_usd": 1e-3}, r"within 0.001 USD; it would take --budget (\S+), or --tokens \S+\. The cheapest"),
        ({"deadline_h": 1e-6}, r"it would take --deadline '(\S+) h'\. The fastest that was found: .* h100"),
        ({"amount": None, "usd_per_million": 1e-9}, r"it would take --usd-per-million (\S+)\."),
        ({"amount": None, "min_samples_per_s": 1e9}, r"it would take --min-throughput (\S+)\."),
    ],
)
def test_a_limit_that_nothing_keeps_says_what_would_do(cheapest, goal, says):
    with pytest.raises(InfeasiblePlanError) as caught:
        goal_of(**goal).check(goal_of(**goal).best(cheapest.frontier))
    found = re.search(says, str(caught.value))
    assert found is not None, str(caught.value)
    (name,) = (name for name in goal if name != "amount")
    loose = goal_of(**(goal | {name: float(found[1])}))
    assert loose.keeps(loose.best(cheapest.frontier))


@pytest.mark.parametrize(
    ("goal", "says"),
    [
        ({"budget_usd": 1.0, "deadline_h": 2.0}, "--budget and --deadline are 2 limits; give one of"),
        ({"amount": None}, "what is wanted? Give --tokens N"),
        ({"amount": None, "budget_usd": 1.0}, "--budget needs --tokens N"),
        ({"budget_usd": -1.0}, "--budget -1: give a number over 0"),
    ],
)
def test_what_is_wanted_must_be_clear(goal, says):
    with pytest.raises(PlanError, match=re.escape(says)):
        goal_of(**goal)


def test_the_cluster_to_rent_is_a_cluster_file_with_its_prices(cheapest):
    cluster = parse_cluster(cheapest.cluster_text, source="rented")
    assert len(cluster.devices) == cheapest.chosen.candidate.devices
    part = cheapest.chosen.candidate.parts[0]
    assert cluster.site_by_name[part.offer.place].prices == {part.offer.kind: part.price}
    # What it comes to is what planning on that file says.
    profile, row = described_profile(cluster, MODEL), cheapest.chosen
    usd_per_step = Evaluator(profile, JOB)(row.plan).usd_per_step
    assert usd_per_step * row.hours * 3600 * (1 - row.lost_ratio) / row.step_s == pytest.approx(
        row.usd * (1 - row.lost_ratio), rel=1e-6
    )


def test_the_bounds_are_bounds_of_all_that_was_planned_for(cheapest):
    graph = described_profile(parse_cluster(cheapest.cluster_text, source="rented"), MODEL).graph
    bounds = LeastCosts(graph, "float32", prices())
    samples = 1e9 / MODEL.sequence_length
    for row in (*cheapest.frontier, cheapest.one_node):
        assert bounds.sample_s(row.candidate) * samples <= row.hours * 3600
        assert bounds.sample_usd(row.candidate) * samples <= row.usd * (1 + 1e-9)


def test_two_places_pay_for_what_goes_between_them_tier_by_tier():
    fast, cheap, spare = prices().table.offers
    one, other = (Rented(offer=offer, hosts=1, market=Market.ON_DEMAND) for offer in (cheap, spare))
    both = Candidate(parts=(one, other))
    cluster = parse_cluster(cluster_text(both, prices()), source="rented")
    assert {site.region for site in cluster.sites} == {"cheap/east", "spare/west"}
    found = list(paired([Candidate(parts=(one,)), Candidate(parts=(other,))], {}))
    assert found == [both]
    assert list(paired([Candidate(parts=(one,)), Candidate(parts=(other,))], {"t4": 0})) == []
    # One stage in each: what crosses is paid at both ends, each by its provider.
    profile = described_profile(cluster, MODEL)
    plan = strategies()["ddp"].propose(_request(profile, Evaluator(profile, JOB)))[0].plan
    sent = Evaluator(profile, JOB)
    sizes = {name: load.size_bytes for name, load in sent.link_loads(plan).items()}
    usd = (0.1 * sizes["cheap-east->spare-west"] + 0.2 * sizes["spare-west->cheap-east"]) / 1e9
    rent_usd = sent(plan).step_s * (0.4 + 2.0) / 3600
    assert sent(plan).usd_per_step == pytest.approx(rent_usd + usd)
    assert fast.place == "fast-east"


ALONE = Constraints(leave_out=("fast", "spare"))


def test_spot_machines_lose_time_and_more_so_the_oftener_they_are_taken():
    calm, rough = (
        rent(asked(OFFERS.replace("preemptions_per_hour: 0.2", f"preemptions_per_hour: {rate}"), ALONE))
        for rate in (0.01, 5)
    )
    spot = [row for row in calm.frontier if row.candidate.parts[0].market is Market.SPOT]
    assert spot
    assert all(0 < row.lost_ratio < 0.05 for row in spot)
    same = {row.candidate.what: row for row in rough.frontier}
    for row in spot:
        if row.candidate.what in same:
            assert same[row.candidate.what].lost_ratio > row.lost_ratio
            assert same[row.candidate.what].hours > row.hours


def test_a_single_machine_goes_back_to_its_checkpoint_and_one_of_several_does_not():
    offer = prices().table.offers[1]

    def loss(hosts):
        candidate = Candidate(parts=(Rented(offer=offer, hosts=hosts, market=Market.SPOT),))
        profile = described_profile(parse_cluster(cluster_text(candidate, prices()), source="rented"), MODEL)
        evaluator = Evaluator(profile, JOB)
        request = _request(profile, evaluator)
        plan = strategies()["ddp"].propose(request)[0].plan
        return loss_of_host_s(plan, profile, "cheap-east-t4-0", "adamw", evaluator(plan).step_s)

    assert loss(1) > REPLACED_S + CHECKPOINT_S / 2
    assert loss(4) < min(REPLACED_S, CHECKPOINT_S) / 2


def _request(profile, evaluator):
    from spantrain.planner.request import PlanRequest

    return PlanRequest(profile=profile, job=JOB, evaluate=evaluator)


def test_quotas_and_what_is_left_out_are_kept():
    only = rent(asked(constraints=Constraints(leave_out=("fast", "p100"), quotas=(Quota(kind="t4", count=2),))))
    assert {part.offer.kind for row in only.frontier for part in row.candidate.parts} == {"t4"}
    assert max(row.candidate.devices for row in only.frontier) <= 2
    with pytest.raises(PlanError, match="nothing is on offer"):
        rent(asked(constraints=Constraints(leave_out=("fast", "cheap", "spare"))))


BOARDS = """
egress: {lab: 0.1, home: 0.3}
lines: {zone: {bandwidth: 1 Gbit/s, latency: 1 ms}, region: {bandwidth: 1 Gbit/s, latency: 1 ms},
  internet: {bandwidth: 1 Gbit/s, latency: 1 ms}}
offers:
  - {provider: lab, region: a, kind: jetson-nano, per_host: 1, most: 1, on_demand: 0.1, network: 1 Gbit/s}
  - {provider: home, region: b, kind: jetson-nano, per_host: 1, most: 1, on_demand: 0.1, network: 1 Gbit/s}
"""


def test_two_places_hold_what_neither_holds_alone_and_pay_for_their_traffic():
    found = rent(replace(asked(BOARDS), model=resolve_model("gpt2-medium"), job=JobSpec(global_batch=8)))
    assert {part.offer.place for part in found.chosen.candidate.parts} == {"lab-a", "home-b"}
    assert found.one_node is None
    assert found.reasons()[0] == "No single machine on offer can hold the model."
    assert found.chosen.egress_usd > 0
    cluster = parse_cluster(found.cluster_text, source="rented")
    sent = Evaluator(described_profile(cluster, resolve_model("gpt2-medium")), JobSpec(global_batch=8))
    sizes = {name: load.size_bytes for name, load in sent.link_loads(found.chosen.plan).items()}
    per_step = (0.1 * sizes["lab-a->home-b"] + 0.3 * sizes["home-b->lab-a"]) / 1e9
    assert found.chosen.egress_usd == pytest.approx(per_step * found.goal.samples / 8)


def test_a_model_that_nothing_holds_is_refused_with_its_bytes():
    large = replace(asked(BOARDS), model=resolve_model("gpt2-large"))
    with pytest.raises(InfeasiblePlanError, match=r"nothing on offer can train gpt2-large: its state takes .* GiB"):
        rent(large)


def test_the_picture_is_svg_and_png(cheapest, tmp_path):
    svg = draw_frontier(cheapest)
    root = ElementTree.fromstring(svg)
    squares = [one for one in root if one.tag.endswith("rect") and float(one.get("width", "0")) < 20]
    assert len(squares) == len(cheapest.frontier) + 2
    pytest.importorskip("PIL")
    for name in ("p.svg", "p.png"):
        write_plot(cheapest, tmp_path / name)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "p.svg").read_text() == svg


def test_all_shipped_offers_become_clusters():
    shipped = shipped_prices()
    for candidate in single_offers(shipped.table.offers, {}):
        if candidate.is_one_node:
            cluster = parse_cluster(cluster_text(candidate, shipped), source=candidate.what)
            assert len(cluster.devices) == candidate.parts[0].offer.per_host
