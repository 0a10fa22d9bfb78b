"""Planning anew beside a run: the profile with slow links, the same devices, a process that ends in any case."""

import subprocess
import sys
import time
from dataclasses import replace

import pytest

from spantrain.adaptation.network_state import LinkState
from spantrain.app.adaptation.replan import BackgroundPlanner, plan_again, slowed_profile
from spantrain.config.artefacts import write_plan, write_profile
from spantrain.core.cluster import Cluster
from spantrain.core.plan import Plan
from spantrain.errors import InfeasiblePlanError
from spantrain.runtime.coordinator.advice import check_change
from testing.patience import PATIENCE_S
from testing.sites import RATE, sites_cluster, sites_profile, two_stages


def with_memory(memory_bytes: int) -> Cluster:
    cluster = sites_cluster()
    return replace(cluster, devices=tuple(replace(device, memory_bytes=memory_bytes) for device in cluster.devices))


CLUSTER = with_memory(2**32)
PROFILE = sites_profile(CLUSTER)
PLAN = two_stages(CLUSTER, "a", "c")
SLOW = LinkState(speeds={("a", "c"): 0.25, ("c", "a"): 0.5})


def answered(planner: BackgroundPlanner) -> Plan | None:
    until_s = time.monotonic() + PATIENCE_S
    while (found := planner.answer()) is None and time.monotonic() < until_s:
        time.sleep(0.02)
    return found


def test_slow_links_are_those_of_all_devices_of_their_sites():
    slow = slowed_profile(PROFILE, SLOW)
    site = {device.name: device.site for device in CLUSTER.devices}
    for (source, target), link in slow.link_by_pair.items():
        before = PROFILE.link_by_pair[source, target].bandwidth_bytes_per_s
        ways = {(site["a"], site["c"]): 0.25, (site["c"], site["a"]): 0.5}
        assert link.bandwidth_bytes_per_s == pytest.approx(before * ways.get((site[source], site[target]), 1.0))
    assert slow.link_by_pair["a", "c"].bandwidth_bytes_per_s == RATE / 4
    assert slowed_profile(PROFILE, LinkState()) == PROFILE


def test_a_plan_made_anew_can_take_over():
    found = plan_again(slowed_profile(PROFILE, SLOW), PLAN, "adamw")
    check_change(PLAN, found)
    small = with_memory(2**20)
    with pytest.raises(InfeasiblePlanError):
        plan_again(sites_profile(small), two_stages(small, "a", "c"), "adamw")


def test_a_process_beside_answers_once():
    planner = BackgroundPlanner(PROFILE, PLAN, "adamw")
    try:
        assert planner.answer() is None
        planner.ask(SLOW)
        found = answered(planner)
        assert found is not None
        assert found.stages == plan_again(slowed_profile(PROFILE, SLOW), PLAN, "adamw").stages
        assert planner.answer() is None
    finally:
        planner.close()


def test_nothing_is_left_of_a_question_whose_time_is_over_or_that_nobody_waits_for():
    planner = BackgroundPlanner(PROFILE, PLAN, "adamw")
    planner.ask(SLOW)
    process, folder = planner._process, planner._folder
    assert process is not None
    assert folder is not None
    planner.close()
    assert process.returncode is not None
    planner.ask(SLOW)
    assert planner.answer() is None
    hasty = BackgroundPlanner(PROFILE, PLAN, "adamw", limit_s=0.0)
    hasty.ask(SLOW)
    assert hasty._process is not None
    assert hasty._process.wait(PATIENCE_S) == 1
    assert hasty.answer() is None


def test_an_answer_that_nobody_waits_for_any_more_is_removed(tmp_path):
    """Who asked was killed."""
    write_profile(PROFILE, tmp_path / "profile.json")
    write_plan(replace(PLAN, profile=None), tmp_path / "plan.json")
    with subprocess.Popen([sys.executable, "-c", ""]) as asker:
        gone = str(asker.pid)
    command = ["-m", "spantrain.app.adaptation.replan", str(tmp_path), "adamw", "", "60.0", gone]
    subprocess.run([sys.executable, *command], check=True, timeout=PATIENCE_S)
    assert not tmp_path.exists()
