"""Slices of the sequence where they are asked for: in plans with groups, in their memory, and refused by name."""

from dataclasses import replace

import pytest

from spantrain.app.profiling.describe import described_profile
from spantrain.config.artefacts import read_plan, write_plan
from spantrain.config.cluster_file import load_preset
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.errors import PlanError
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOptions, PlanOutcome
from spantrain.planner.request import Constraints, JobSpec

JOB = JobSpec(global_batch=64)


def profile_of(model: str) -> Profile:
    return described_profile(load_preset("spantrain-cn"), resolve_model(model))


def planned(model: str, strategy: str, *, slices: bool) -> PlanOutcome:
    options = PlanOptions(strategies=(strategy,), constraints=Constraints(sequence_parallel=slices))
    return make_plan(profile_of(model), JOB, options)


def without_slices(plan: Plan) -> Plan:
    return replace(plan, stages=tuple(replace(stage, sequence_parallel=False) for stage in plan.stages))


def test_groups_hold_slices_and_so_less(tmp_path) -> None:
    whole, sliced = (planned("gpt2-tiny", "spantrain", slices=slices) for slices in (False, True))
    assert [stage.sequence_parallel for stage in sliced.plan.stages] == [True]
    assert not any(stage.sequence_parallel for stage in whole.plan.stages)
    assert without_slices(sliced.plan).stages == whole.plan.stages
    for device, size in whole.peak_bytes.items():
        assert sliced.peak_bytes[device] < size, device
    write_plan(sliced.plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").stages == sliced.plan.stages


def test_a_plan_without_groups_says_why_nothing_is_sliced() -> None:
    outcome = planned("gpt2-tiny", "single-device", slices=True)
    assert not any(stage.sequence_parallel for stage in outcome.plan.stages)
    assert any("no sequence is sliced" in reason for reason in outcome.report.reasons)


def test_a_model_without_a_sequence_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"no unit of resnet-tiny .* leave --sequence-parallel out"):
        planned("resnet-tiny", "spantrain", slices=True)


def test_a_stage_of_single_devices_has_nobody_to_share_a_sequence_with() -> None:
    (stage,) = planned("gpt2-tiny", "single-device", slices=False).plan.stages
    with pytest.raises(ValueError, match="sequence_parallel needs a replica of several devices"):
        replace(stage, sequence_parallel=True)
