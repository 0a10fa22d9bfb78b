"""A limit on money: with a rising one throughput never falls, and there is a plan as long as a cheaper one is known."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.app.profiling.describe import described_profile
from spantrain.config.cluster_file import parse_cluster
from spantrain.errors import InfeasiblePlanError
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.cheaper import with_cheaper
from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.request import Constraints, JobSpec, Objective, PlanRequest
from spantrain.planner.strategies.registry import strategies

JOB = JobSpec(global_batch=16, micro_batches=(2, 4))
AUTO = strategies()["auto"].propose


def profile_of(first, second, bandwidth, egress):
    kinds = [
        f"[{', '.join(f'{{name: {site}{index}, devices: {{{kind}: 1}}}}' for index, kind in enumerate(row))}]"
        for site, row in (("a", first), ("b", second))
    ]
    text = f"""
name: two
sites:
  - {{name: a, region: x/y, network: {{bandwidth: 10 Gbit/s, latency: 0.1 ms}}, egress: {egress}, hosts: {kinds[0]}}}
  - {{name: b, region: x/y, network: {{bandwidth: 10 Gbit/s, latency: 0.1 ms}}, egress: {egress}, hosts: {kinds[1]}}}
links: [{{between: all, bandwidth: {bandwidth} Gbit/s, latency: 0.5 ms}}]
"""
    return described_profile(parse_cluster(text, source="drawn"), resolve_model("gpt2-mini"))


class Best:
    """The best plans of a profile's devices; what does not depend on the limit is searched once for all limits."""

    def __init__(self, profile):
        self._profile, self._evaluate = profile, Evaluator(profile, JOB)
        self._asked = {}

    def __call__(self, **asked):
        """Return samples per second and US dollars of the best plan; nothing where none keeps the limits."""
        request = PlanRequest(profile=self._profile, job=JOB, evaluate=self._evaluate, **asked)
        try:
            found = [self._evaluate(proposal.plan) for proposal in with_cheaper(self._auto)(request)]
        except InfeasiblePlanError:
            return 0.0, 0.0
        kept = [one for one in found if one.fits and not one.broken(request.constraints)]
        return max(((one.samples_per_s, one.usd_per_step) for one in kept), default=(0.0, 0.0))

    def under(self, usd, **more):
        return self(constraints=Constraints(max_usd_per_step=usd, **more))

    def _auto(self, request):
        """Propose, and simulate, what was proposed and simulated when this was asked before."""
        key = request.constraints, request.objective
        if key not in self._asked:
            plans = []
            noted = replace(request, evaluate=lambda plan: plans.append(plan) or request.evaluate(plan))
            try:
                found, refusal = AUTO(noted), None
            except InfeasiblePlanError as error:
                found, refusal = (), error
            self._asked[key] = found, refusal, plans
        found, refusal, plans = self._asked[key]
        for plan in plans:
            request.evaluate(plan)
        if refusal is not None:
            raise refusal
        return found


@settings(max_examples=4)
@given(
    first=st.lists(st.sampled_from(["t4", "v100", "a10"]), min_size=1, max_size=3),
    second=st.lists(st.sampled_from(["t4", "p100", "l4"]), min_size=1, max_size=2),
    bandwidth=st.sampled_from([1, 25]),
    egress=st.sampled_from([0, 0.05]),
)
def test_with_a_rising_limit_throughput_never_falls(first, second, bandwidth, egress):
    best = Best(profile_of(first, second, bandwidth, egress))
    cheap = best(objective=Objective.COST)[1]
    fast = best()[1]
    known_usd, last = cheap, 0.0
    for step in range(5):
        limit = cheap * 1.0001 * max(1.2, fast / cheap * 1.1) ** (step / 4)
        speed, usd = best.under(limit)
        assert usd <= limit
        assert speed > 0, f"a plan of {known_usd} USD a step is known, and none was found under {limit}"
        assert speed >= last * (1 - 1e-9)
        last = speed


def test_limits_on_an_hour_rise_alike_and_what_nothing_keeps_is_refused():
    best = Best(profile_of(["t4", "t4", "v100"], ["p100"], 10, 0.01))
    speeds = [best(constraints=Constraints(max_usd_per_hour=usd))[0] for usd in (0.4, 0.6, 3.2, 9)]
    assert speeds[0] == 0
    assert speeds[1] > 0
    assert speeds == sorted(speeds)
    # A limit on time is kept beside it.
    assert best.under(1.0, min_samples_per_s=speeds[-1] * 2) == (0.0, 0.0)


def test_where_money_has_no_limit_nothing_more_is_asked(monkeypatch):
    profile, asked = profile_of(["t4"], ["t4"], 10, 0), []

    def strategy(request):
        asked.append(request.constraints.max_usd_per_step)
        return AUTO(request)

    request = PlanRequest(profile=profile, job=JOB, evaluate=Evaluator(profile, JOB))
    assert with_cheaper(strategy)(request) == AUTO(request)
    assert asked == [None]
    limited = PlanRequest(
        profile=profile, job=JOB, evaluate=request.evaluate, constraints=Constraints(max_usd_per_step=1e-9)
    )
    with_cheaper(strategy)(limited)
    assert asked[1:4] == [1e-9, None, None]
    with pytest.raises(InfeasiblePlanError, match="nothing"):
        with_cheaper(lambda _: (_ for _ in ()).throw(InfeasiblePlanError("nothing")))(limited)
