"""What of a change of plan is worth going ahead."""

from dataclasses import replace

import pytest

from spantrain.app.planning.ahead import ahead_of
from spantrain.app.profiling.describe import described_profile
from spantrain.config.cluster_file import load_preset
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.request import Constraints, JobSpec

GONE = "home-nano"


@pytest.fixture(scope="module")
def change():
    """A profile, the plan for all devices of the laptop, and the one without a device."""
    profile = described_profile(load_preset("laptop"), resolve_model("gpt2-tiny"))
    job = JobSpec(global_batch=48, optimizer="adamw")
    options = PlanOptions(strategies=("spantrain-dp",))
    without = replace(options, constraints=Constraints(leave_out=(GONE,)))
    return profile, make_plan(profile, job, options).plan, make_plan(profile, job, without).plan


def test_what_a_device_lacks_comes_from_who_holds_it(change):
    profile, whole, less = change
    found = ahead_of(profile, "adamw", less, whole, (1.7, 1.6))
    assert found is not None
    assert any(copy.taker == GONE for copy in found.copies)
    for copy in found.copies:
        held = less.crew_of(copy.giver).units
        wanted = whole.crew_of(copy.taker).units
        assert set(copy.units) <= set(held) & set(wanted)
        if copy.taker in less.devices:
            assert not set(copy.units) & set(less.crew_of(copy.taker).units)


def test_nothing_goes_ahead_where_the_plan_to_come_is_so_much_faster_that_waiting_costs_more(change):
    profile, whole, less = change
    assert ahead_of(profile, "adamw", less, whole, (1.7, 0.8)) is None
    assert ahead_of(profile, "adamw", whole, less, (1.6, 1.7)) is not None, "who leaves makes steps longer"


def test_nothing_goes_ahead_where_links_cannot_carry_what_steps_sum(change):
    profile, whole, less = change
    assert ahead_of(profile, "adamw", less, whole, (0.1, 0.1)) is None


def test_nothing_goes_ahead_where_it_would_take_no_time(change):
    profile, whole, _ = change
    assert ahead_of(profile, "adamw", whole, whole, (1.7, 1.6)) is None


def test_nothing_goes_ahead_where_memory_has_no_room_for_copies(change):
    profile, whole, less = change
    cluster = profile.cluster.with_memory({device.name: 1 for device in profile.cluster.devices})
    cluster = replace(cluster, hosts=tuple(replace(host, memory_bytes=1) for host in cluster.hosts))
    assert ahead_of(replace(profile, cluster=cluster), "adamw", less, whole, (1.7, 1.6)) is None
