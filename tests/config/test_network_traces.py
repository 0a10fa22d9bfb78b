"""Networks that change: names with parameters, files, and what becomes of them on a cluster."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spantrain.config.cluster_file import load_preset
from spantrain.config.traces.library import EXAMPLES, named_trace
from spantrain.config.traces.network_traces import (
    Changes,
    changes_text,
    network_links,
    network_trace,
    read_changes,
    write_changes,
)
from spantrain.core.speed import SpeedTrace
from spantrain.errors import ConfigError

LAPTOP = load_preset("laptop")
WAYS = ("lab->office", "office->lab", "lab->home", "home->lab", "office->home", "home->office")


@given(name=st.sampled_from(EXAMPLES), run_s=st.floats(0.05, 1e6))
def test_every_trace_leaves_the_link_as_it_was(name: str, run_s: float) -> None:
    speed = named_trace(name).speed(run_s, "lab->office")
    assert speed.changes[-1][1] == 1.0
    assert all(0 <= part <= 1 for _, part in speed.changes)
    assert any(part < 1 for _, part in speed.changes)


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("drop-40", ((25.0, 0.6), (75.0, 1.0))),
        ("drop-60:from=10s,until=40s", ((10.0, 0.4), (40.0, 1.0))),
        ("drop-12.5:until=2min", ((25.0, 0.875), (120.0, 1.0))),
        ("square:period=50%,low=0.2", ((0.0, 1.0), (25.0, 0.2), (50.0, 1.0), (75.0, 0.2), (100.0, 1.0))),
        ("burst", ((40.0, 0.44), (60.0, 1.0))),
        ("outage-30:from=5s", ((5.0, 0.0), (35.0, 1.0))),
    ],
)
def test_what_a_name_stands_for(text: str, changes: tuple[tuple[float, float], ...]) -> None:
    assert named_trace(text).speed(100.0, "lab->office").changes == changes


def test_a_walk_is_the_same_each_time_and_another_on_each_link_and_with_each_seed() -> None:
    walks = [
        named_trace(text).speed(100.0, link).changes
        for text in ("random-walk", "random-walk:seed=1")
        for link in ("lab->office", "office->lab")
    ]
    assert len(set(walks)) == 4
    assert named_trace("random-walk").speed(100.0, "lab->office").changes == walks[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("drop50", "did you mean 'drop-50'"),
        ("drop-120", "more than 0 and less than 100"),
        ("drop-50:form=10s", "from"),
        ("drop-50:from=10", "needs a number and one of"),
        ("drop-50:from=-5%", "no part of the run"),
        ("square:low=1.5", "low must be more than 0 and less than 1"),
        ("square:low=half", "low must be a number"),
        ("outage-0", "more than 0 s"),
        ("drop-50:links=", "links needs names"),
        ("nowhere.yaml", "there is no such file"),
    ],
)
def test_what_is_wrong_with_a_name_is_said(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        network_trace(text)


@pytest.mark.parametrize("text", ["drop-50:from=80%", "drop-50:from=60s,until=40s", "square:period=1ms"])
def test_times_that_do_not_fit_the_run_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="in a run of 100 s"):
        network_trace(text).on(LAPTOP, 100.0)


def test_a_name_changes_all_links_of_a_cluster_or_those_that_are_named() -> None:
    assert set(network_links(LAPTOP)) == set(WAYS)
    everywhere = network_trace("drop-50").on(LAPTOP, 100.0)
    assert set(everywhere) == set(WAYS)
    assert set(everywhere.values()) == {SpeedTrace(changes=((25.0, 0.5), (75.0, 1.0)))}
    some = network_trace("drop-50:from=10s,links=lab->office+home->lab").on(LAPTOP, 100.0)
    assert set(some) == {"lab->office", "home->lab"}
    with pytest.raises(ConfigError, match="no link 'lab->ofice'; did you mean 'lab->office'"):
        network_trace("drop-50:links=lab->ofice").on(LAPTOP, 100.0)


def test_lines_change_with_the_ways_but_a_walk_is_for_ways_only() -> None:
    links = ("lab->office", "lab up")
    assert set(network_trace("burst").on_links(links, 10.0)) == set(links)
    assert set(network_trace("random-walk").on_links(links, 10.0)) == {"lab->office"}
    with pytest.raises(ConfigError, match="one site only"):
        network_trace("burst").on_links((), 10.0)


times = st.lists(st.integers(0, 10**6), min_size=1, max_size=8, unique=True).map(sorted)


@st.composite
def speed_traces(draw: st.DrawFn) -> SpeedTrace:
    at = [time / 1000 for time in draw(times)]
    parts = [draw(st.just(0.0) | st.floats(1e-6, 3)) for _ in at[1:]]
    return SpeedTrace(changes=tuple(zip(at, [*parts, draw(st.floats(0.01, 3))], strict=True)))


@given(
    links=st.dictionaries(st.sampled_from([*WAYS, "lab up", "home down"]), speed_traces(), max_size=3),
    devices=st.dictionaries(st.sampled_from(["lab-0", "home-nano"]), speed_traces(), max_size=2),
)
def test_a_file_is_read_back_as_it_was_written(links, devices, tmp_path_factory) -> None:
    changes = Changes(link_speed=links, device_speed=devices)
    path = tmp_path_factory.mktemp("changes") / "trace.yaml"
    write_changes(changes, path)
    assert read_changes(path) == changes


def test_a_file_is_a_trace_if_it_is_about_links(tmp_path: Path) -> None:
    speed = SpeedTrace(changes=((1.5, 0.25),))
    path = tmp_path / "slow.yaml"
    write_changes(Changes(link_speed={"lab->home": speed}), path)
    assert network_trace(str(path)).on(LAPTOP, 7.0) == {"lab->home": speed}
    write_changes(Changes(link_speed={"lab->moon": speed}), path)
    with pytest.raises(ConfigError, match="no link 'lab->moon'"):
        network_trace(str(path)).on(LAPTOP, 7.0)
    write_changes(Changes(link_speed={"lab->home": speed}, device_speed={"lab-0": speed}), path)
    with pytest.raises(ConfigError, match="about links only; leave out lab-0"):
        network_trace(str(path))
    path.write_text(changes_text(Changes()))
    with pytest.raises(ConfigError, match="at least one link"):
        network_trace(str(path))
