"""What the paper's adapter decides between steps."""

from collections.abc import Mapping, Sequence

from spantrain.adaptation.network_state import LinkState, Pair
from spantrain.adaptation.paper import PaperBoundary
from spantrain.core.plan import Plan
from testing import four_sites
from testing.link_table import SIZE, STEP_S, TableForecast, reports

CALM, POOR = [8] * 8 + [4] * 8, [4] * 8 + [8] * 4 + [4] * 8
"""The sizes of micro-batches that the paper's rules want of twelve of 8."""


def paper(plan: Plan, parts: Sequence[float], **kind: float) -> list[list[int]]:
    """The sizes of the micro-batches of the first stage, after reports of links at parts of their rates in turn."""
    boundary, sizes, running = PaperBoundary(plan, TableForecast()), [], plan
    for step, part in enumerate(parts):
        proposal = boundary.advise(step, running, reports(plan, part, **kind), STEP_S)
        running = running if proposal is None else proposal.plan
        sizes.append([span.size for span in running.stages[0].micro_batches])
        assert proposal is None or ("poor link" in proposal.reason) is (sizes[-1] == POOR)
    return sizes


def test_the_papers_rules_halve_the_ends_and_come_back():
    plan = four_sites.plan(0.01, samples=96)
    assert paper(plan, (1.0,) * 3 + (0.5, 0.5, 1.0, 1.0)) == [CALM] * 3 + [POOR, POOR, CALM, CALM]


def test_what_a_runtime_always_measures_less_than_expected_is_no_poor_link():
    plan = four_sites.plan(0.01, samples=96)
    assert paper(plan, (0.7,) * 5) == [CALM] * 5, "it is learnt of the first reports"
    assert paper(plan, (1.0,) * 3 + (0.82, 0.85, 1.0)) == [CALM] * 6
    assert paper(plan, (1.0,) * 3 + (0.5,) * 3, confidence=0.5) == [CALM] * 6, "messages do not agree"
    assert paper(plan, (1.0,) * 3 + (0.5,) * 3, busy_s=0.01) == [CALM] * 6, "it is hardly used"


def test_a_poor_link_stays_so_up_to_nine_tenths_of_what_is_expected():
    plan = four_sites.plan(0.01, samples=96)
    assert paper(plan, (1.0,) * 3 + (0.75, 0.78, 0.85, 0.95)) == [CALM] * 3 + [POOR] * 3 + [CALM]


class SmallAreSlow(TableForecast):
    """Small messages are measured at half the rate of others, as of links that others use at times."""

    def rates(self, plan: Plan, state: LinkState) -> Mapping[Pair, float]:
        small = min(span.size for span in plan.stages[0].micro_batches) < SIZE
        return {pair: rate * (0.5 if small else 1.0) for pair, rate in super().rates(plan, state).items()}


def test_messages_are_compared_with_what_is_expected_of_this_plan():
    """Those of a plan with smaller micro-batches look slow beside the best that was seen under another."""
    plan = four_sites.plan(0.01, samples=96)
    boundary = PaperBoundary(plan, SmallAreSlow())
    first = boundary.advise(0, plan, reports(plan, 1.0), STEP_S)
    assert first is not None
    for step in range(1, 8):
        assert boundary.advise(step, first.plan, reports(plan, 0.5), STEP_S) is None, "calm"
    poor = boundary.advise(8, first.plan, reports(plan, 0.25), STEP_S)
    assert poor is not None
    assert [span.size for span in poor.plan.stages[0].micro_batches] == POOR
