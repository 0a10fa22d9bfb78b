"""Plans for losses over pairs: all that are found train, of micro-batches that have a loss."""

from dataclasses import replace

import pytest

from spantrain.config.cluster_file import load_preset
from spantrain.core.profile import Profile
from spantrain.cost.analytic import analytic_profile
from spantrain.errors import InfeasiblePlanError
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.graph import build_graph
from spantrain.models.tracing.model import cut_model
from spantrain.models.tracing.source import load_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.request import Constraints, JobSpec
from spantrain.schedule.at_once import check_samples_at_once
from testing.models.zoo.trial import EQUAL, FOLDER, largest_error

pytestmark = pytest.mark.models

PLACES = Constraints(keep=("lab", "office", "home"), leave_out=("lab-0", "office-nx"))


@pytest.fixture(scope="module")
def clip() -> Profile:
    spec = resolve_model(f"{FOLDER / 'pictures'}.py:clip")
    return analytic_profile(load_preset("laptop"), spec, build_graph(spec))


@pytest.mark.parametrize("strategies", [(), ("ddp",), ("spantrain-dp",), ("gpipe",)], ids=" ".join)
def test_every_plan_has_pairs_at_once(clip: Profile, strategies: tuple[str, ...]) -> None:
    check_samples_at_once(
        make_plan(clip, JobSpec(global_batch=15), PlanOptions(strategies=strategies)).plan, clip.graph
    )


def test_a_plan_over_three_places_trains_as_plain_pytorch_of_its_micro_batches(clip: Profile) -> None:
    plan = make_plan(clip, JobSpec(global_batch=6), PlanOptions(constraints=PLACES)).plan
    check_samples_at_once(plan, clip.graph)
    assert 5 in [stage.first_unit for stage in plan.stages], "where the second tower begins"
    whole = replace(load_model(clip.model, seed=0), trains=cut_model(clip.model).whole.trains)
    assert largest_error(clip.model, clip.graph, plan, whole) <= EQUAL


def test_fewer_are_refused_before_anything_is_searched(clip: Profile) -> None:
    for job in (JobSpec(global_batch=1), JobSpec(global_batch=8, micro_batches=(1, 4))):
        with pytest.raises(InfeasiblePlanError, match=r"fewer than 2 at once nothing is learnt: name larger .* than 1"):
            make_plan(clip, job)
