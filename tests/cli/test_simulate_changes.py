"""`spantrain simulate` of what changes in time: speeds, networks with an adapter, devices that leave and come."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from spantrain.config.artefacts import write_profile
from spantrain.planner.engine.predict import predict
from testing.plans import written
from testing.programs import simulate_refuses
from testing.sites import sites_cluster, sites_profile, two_stages


def test_changes_of_speed_lengthen_a_step(spantrain, plan_path, tmp_path):
    path = tmp_path / "changes.yaml"
    path.write_text(
        "devices:\n  office-nx:\n    - {at: 0 s, speed: 0.5}\n"
        "links:\n  lab->home:\n    - {at: 0 s, speed: 0.25}\n    - {at: 1 h, speed: 1}\n"
    )
    steps = {}
    for words in ((), ("--changes", path)):
        ended = spantrain("simulate", plan_path, "--json", *words)
        assert ended.code == 0, ended.err
        steps[words] = json.loads(ended.out)["schedules"]["critical-path"]["step_s"]
    assert steps["--changes", path] > 1.1 * steps[()]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("links:\n  lab->home:\n    - {at: 8 s, speed: 1}\n    - {at: 5 s, speed: 2}\n", "line 4"),
        ("links:\n  lab->home:\n    - {at: 8 s, speed: 1}\n    - {at: 5 s, speed: 2}\n", "runs backwards in time"),
        ("links:\n  lab->moon:\n    - {at: 8 s, speed: 1}\n", "sends nothing over lab->moon; it uses"),
        ("devices:\n  lab-7:\n    - {at: 8 s, speed: 1}\n", "no replica is led by lab-7"),
        ("devices:\n  lab-0:\n    - {at: 8 s, speed: 0}\n", "ends with speed 0"),
        ("devices:\n  lab-0:\n    - {at: 8 s, speed: -1}\n    - {at: 9 s, speed: 1}\n", "a millionth or more"),
        ("devices:\n  lab-0:\n", "at least one change"),
        ("devices:\n  lab-0:\n    - {at: 8, speed: fast}\n", "2 problems"),
        ("device: {}\n", "did you mean 'devices'"),
    ],
)
def test_wrong_changes(text, says, spantrain, plan_path, tmp_path):
    path = tmp_path / "changes.yaml"
    path.write_text(text)
    assert says in simulate_refuses(spantrain, plan_path, "--changes", path)


@pytest.mark.parametrize("adapter", ["auto", "paper", "off"])
def test_steps_with_an_adapter_say_when_and_why_plans_changed(adapter, spantrain, plan, plan_path, laptop_profile):
    ended = spantrain(
        "simulate", plan_path, "--network-trace", "drop-60", "--adapter", adapter, "--steps", 14, "--json"
    )
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    steps = found["steps"]
    assert [step["step"] for step in steps] == list(range(14))
    assert found["calm_step_s"] == pytest.approx(predict(plan, laptop_profile).step_s)
    assert found["total_s"] == pytest.approx(steps[-1]["begun_s"] + steps[-1]["step_s"])
    assert all(bool(step["reason"]) == (step["plan"] > before["plan"]) for before, step in pairwise(steps))
    if adapter == "off":
        assert not any(step["plan"] or step["recuts"] for step in steps)
    if adapter == "paper":
        assert "small ones at the end" in steps[1]["reason"]


def test_the_table_of_an_adapter_names_steps_and_reasons(spantrain, plan_path):
    ended = spantrain("simulate", plan_path, "--network-trace", "drop-60", "--adapter", "paper", "--steps", 3)
    assert ended.code == 0, ended.err
    for word in ("3 steps under drop-60", "a calm step takes", "plan 1: small ones at the end of the step"):
        assert word in ended.out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--adapter", "fast", "--network-trace", "drop-50"), "auto, paper, off"),
        (("--adapter", "auto"), "--network-trace"),
        (("--adapter", "auto", "--network-trace", "drop-50", "--memory-limit", "4GiB"), "--memory-limit"),
    ],
)
def test_what_does_not_go_with_an_adapter(options, says, spantrain, plan_path):
    ended = spantrain("simulate", plan_path, *options)
    assert ended.code == 2
    assert says in ended.err


@pytest.fixture
def small_plan_path(tmp_path) -> Path:
    """Of two stages with two replicas each, on devices for which plans are found at once."""
    small = sites_cluster()
    cluster = replace(small, devices=tuple(replace(one, memory_bytes=2**32) for one in small.devices))
    write_profile(sites_profile(cluster), tmp_path / "profile.json")
    return written(two_stages(cluster, "ab", "cd"), tmp_path / "profile.json", tmp_path / "plan.json")


def test_a_run_whose_devices_leave_and_come(spantrain, small_plan_path, tmp_path):
    trace = tmp_path / "outages.csv"
    trace.write_text("time_s,device,event\n60,c,leaves\n120,c,comes\n")
    asked = ("simulate", small_plan_path, "--availability", trace, "--hours", "0.2")
    ended = spantrain(*asked, "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["lines"][0].startswith("60.0 s: c lost (no heartbeat for 1.9 s): step ")
    assert (found["steps_lost"], found["rent_usd"]) == (1, None)
    assert 0.9 < found["share"] <= 1
    before_it_leaves = spantrain(*asked[:-1], "0.01")
    assert "of what the devices present could do" in before_it_leaves.out
    trace.write_text("time_s,device,event\n60,nobody,leaves\n")
    assert "outages.csv, line 2, field device" in simulate_refuses(spantrain, *asked[1:])
    assert "--hours, --checkpoint-every and --protect" in simulate_refuses(spantrain, small_plan_path, "--hours", "1")
    assert "not with --schedule" in simulate_refuses(spantrain, *asked[1:], "--schedule", "all")
    assert "--steps" in simulate_refuses(spantrain, *asked[1:], "--steps", "4")
    assert "--protect some: give auto, none, one" in simulate_refuses(spantrain, *asked[1:], "--protect", "some")
