"""`--staleness 1`, as one asks for it: what is predicted, and what is refused with one message."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from spantrain.config.artefacts import reference_to_profile, write_plan
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.request import JobSpec


@pytest.fixture(scope="module")
def plan(laptop_profile):
    options = PlanOptions(strategies=("pipedream",))
    return make_plan(laptop_profile, JobSpec(global_batch=48, schedule="1f1b"), options).plan


@pytest.fixture
def plan_path(plan, profile_path, tmp_path) -> Path:
    path = tmp_path / "plan.json"
    write_plan(replace(plan, profile=reference_to_profile(profile_path, path)), path)
    return path


def test_simulate_shows_steps_that_overlap(spantrain, plan_path):
    found = []
    for staleness in (0, 1):
        ended = spantrain("simulate", plan_path, "--staleness", staleness, "--json")
        assert ended.code == 0, ended.err
        (outcome,) = json.loads(ended.out)["schedules"].values()
        found.append(outcome)
    exact, stale = found
    assert stale["step_s"] < exact["step_s"]
    assert exact["lower_bound_s"] <= exact["step_s"]
    assert stale["lower_bound_s"] is stale["ratio_to_bound"] is None
    assert all(stale["peak_bytes"][device] > size for device, size in exact["peak_bytes"].items())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--staleness", "1", "--adapter", "auto"), "staleness 1 goes with adapter off, got auto"),
        (("--staleness", "1", "--adapter", "paper"), "plans change between steps only"),
        (("--staleness", "2"), "--staleness"),
    ],
)
def test_what_does_not_go_together(words, says, spantrain, plan_path, tmp_path):
    ended = spantrain("train", plan_path, "--out", tmp_path / "run", *words)
    assert ended.code == 2
    assert says in ended.err
    assert "Traceback" not in ended.err
