"""Runs whose devices leave and come, simulated: what is lost, what is told, bad traces."""

from dataclasses import replace

import pytest

from spantrain.app.simulation.availability import events_of, run_availability
from spantrain.core.plan import Plan
from spantrain.errors import ConfigError
from spantrain.sim.availability import AvailabilityEvent, detect_s
from testing.sites import sites_cluster, sites_profile, two_stages

SMALL = sites_cluster()
CLUSTER = replace(SMALL, devices=tuple(replace(one, memory_bytes=2**32) for one in SMALL.devices))
PROFILE = sites_profile(CLUSTER)
PLAN: Plan = two_stages(CLUSTER, "a", "c")
HEAD = "time_s,device,event\n"


def went(*events: tuple[float, str, bool], until_s: float = 1000.0, every: int | None = None, losses: int | None = 0):
    made = [AvailabilityEvent(at_s=at_s, device=device, comes=comes) for at_s, device, comes in events]
    return run_availability(PLAN, PROFILE, made, until_s, "adamw", every, losses)


def test_a_calm_run_loses_nothing():
    calm = went()
    assert calm.steps > 0
    assert calm.steps_lost == calm.moved_bytes == sum(calm.pause_s.values()) == 0
    assert 0 < calm.share <= 1


def test_the_only_holder_takes_all_steps_behind_the_newest_checkpoint():
    free, kept = went((500.0, "c", False)), went((500.0, "c", False), every=3)
    assert free.steps_lost > kept.steps_lost
    assert "the beginning" in free.lines[0]
    assert "the checkpoint after" in kept.lines[0]
    assert kept.steps > free.steps
    assert kept.pause_s["detect"] == detect_s(alone=False) < 2
    assert detect_s(alone=True) == pytest.approx(6, abs=0.2)


def test_what_is_kept_twice_costs_a_step_and_not_more_than_it_saves():
    calm, free = went(), went((500.0, "c", False))
    kept, kept_calm = went((500.0, "c", False), losses=1), went(losses=1)
    assert kept.steps_lost == 1
    assert "is trained again" in kept.lines[0]
    assert kept.steps > free.steps
    assert kept_calm.steps <= calm.steps
    assert went(losses=None).steps >= 0.97 * calm.steps


def test_the_same_input_gives_the_same_answer_and_share_stays_a_share():
    events = events_of("mtbf:0.1,repair:0.05,seed:3", CLUSTER, 1000.0)
    first, again = (run_availability(PLAN, PROFILE, events, 1000.0, "adamw", 5) for _ in range(2))
    assert first == again
    assert len(first.lines) == len(events)
    assert 0 <= first.share <= 1
    assert all(0 <= seconds <= 1000 for seconds in first.pause_s.values())


def test_a_run_without_devices_waits_for_one():
    names = list(CLUSTER.device_by_name)
    gone = went(*((100.0, name, False) for name in names), (200.0, names[0], True))
    assert gone.pause_s["none"] >= 100
    assert any("waits for others" in line for line in gone.lines)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("t.csv", "when,device\n", "line 1"),
        ("t.csv", HEAD + "1,a,leaves\nsoon,a,comes\n", "line 3, field time_s"),
        ("t.csv", HEAD + "1,nobody,leaves\n", "line 2, field device"),
        ("t.csv", HEAD + "1,a,explodes\n", "line 2, field event"),
        ("t.csv", HEAD + "1,a\n", "line 2, field event"),
        ("t.json", "[{]", "line 1"),
        ("t.json", '[{"time_s": 1, "device": "a", "event": "leaves", "more": 1}]', "event 1, field more"),
    ],
)
def test_a_bad_trace_is_refused_by_file_line_and_field(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said) as error:
        events_of(str(tmp_path / name), CLUSTER, 1.0)
    assert name in str(error.value)


@pytest.mark.parametrize("text", ["mtbf:0", "mtbf:x", "mtbf:1,colour:2", "mtbf:1,repair:nan"])
def test_a_bad_drawing_is_refused(text):
    with pytest.raises(ConfigError, match="--availability, field"):
        events_of(text, CLUSTER, 1.0)
