"""What tests of strategies share: a request, the sites of a small random case, and what every proposal must be."""

from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

from spantrain.core.profile import Profile
from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.request import Constraints, JobSpec, PlanRequest, Proposal


def request_of(profile: Profile, job: JobSpec, **constraints: Any) -> PlanRequest:
    """Ask without a strategy's own limits; plans are evaluated as the program does."""
    return PlanRequest(
        profile=profile, job=job, constraints=Constraints(**constraints), evaluate=Evaluator(profile, job)
    )


def draw_sites(data: st.DataObject, *, most_devices: int) -> dict[str, dict[str, float]]:
    """Draw up to three sites of so many devices at most, fast and slow ones."""
    return {
        f"s{k}": {
            f"d{k}{n}": data.draw(st.sampled_from([0.002, 0.01]))
            for n in range(data.draw(st.integers(1, most_devices)))
        }
        for k in range(data.draw(st.integers(1, 3)))
    }


def draw_memory_bytes(data: st.DataObject) -> int:
    """Draw the memory of every device: for next to nothing, for a part of a small model, or for all of it."""
    return data.draw(st.sampled_from([305, 315, 4000])) * 2**20


def assert_plans_fit(request: PlanRequest, proposals: Iterable[Proposal]) -> None:
    """Every unit and every sample is somewhere once, within memory, and the strategy's own estimate is a time."""
    for proposal in proposals:
        plan = proposal.plan
        assert plan.stages[-1].end_unit == len(request.profile.graph.units)
        for stage in plan.stages:
            held = [span for index in range(len(stage.replicas)) for span in stage.replica_spans(index)]
            assert sum(span.size for span in held) == plan.global_batch
        assert request.evaluate(plan).fits
        assert proposal.own_estimate_s is not None
        assert 0 < proposal.own_estimate_s < float("inf")
