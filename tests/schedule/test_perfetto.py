"""The trace file: slices that don't overlap, arrows, and everything back again."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.config.files.text_files import write_atomically
from spantrain.config.traces.trace_file import read_trace
from spantrain.core.trace import LANES, Flow, Interval, Trace
from spantrain.errors import UsageError
from spantrain.schedule.render.perfetto import perfetto_json


def interval(device: str, lane: str, name: str, start_s: float, end_s: float, **detail: int) -> Interval:
    return Interval(device=device, lane=lane, name=name, step=3, start_s=start_s, end_s=end_s, detail=detail)


@pytest.fixture
def trace() -> Trace:
    """Two messages at once from one device to two others, an hour after the clock's start."""
    flows = tuple(
        Flow(
            name=f"g0/s3/forward/cut5{span}",
            source="edge",
            target=target,
            step=3,
            sent_s=3601.0,
            received_s=3602.5,
            size_bytes=10,
        )
        for span, target in (("[0:2]", "lab"), ("[2:4]", "cloud"))
    )
    return Trace(
        intervals=(
            interval("edge", "compute", "0F[0:4]", 3600.0, 3601.0),
            interval("edge", "send", "forward [0:2] to lab", 3601.0, 3602.0, bytes=10),
            interval("edge", "send", "forward [2:4] to cloud", 3601.0, 3602.25, bytes=10),
            interval("lab", "receive", "forward [0:2] from edge", 3601.5, 3602.5, bytes=10),
            interval("cloud", "receive", "forward [2:4] from edge", 3601.5, 3602.5, bytes=10),
        ),
        flows=flows,
        clock="virtual",
    )


def slices(page: dict) -> list[dict]:
    return [event for event in page["traceEvents"] if event["ph"] == "X"]


def test_a_process_for_each_device_and_a_track_for_each_lane(trace: Trace) -> None:
    events = perfetto_json(trace)["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    tracks = {(names[e["pid"]], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert tracks == {
        ("edge", "compute"), ("edge", "send"), ("edge", "send 2"), ("lab", "receive"), ("cloud", "receive"),
    }  # fmt: skip


def test_times_are_microseconds_from_the_first_start(trace: Trace) -> None:
    first = slices(perfetto_json(trace))[0]
    assert (first["name"], first["ts"], first["dur"], first["args"]["step"]) == ("0F[0:4]", 0.0, 1e6, 3)


def test_arrows_lead_from_a_message_s_send_to_its_receive(trace: Trace) -> None:
    page = perfetto_json(trace)
    for start, end in zip(*([e for e in page["traceEvents"] if e["ph"] == phase] for phase in "sf"), strict=True):
        assert start["id"] == start["bind_id"] == end["id"] == end["bind_id"]
        assert end["bp"] == "e"
        under = [next(s for s in slices(page) if (s["pid"], s["tid"]) == (e["pid"], e["tid"])) for e in (start, end)]
        span = start["name"].removeprefix("g0/s3/forward/cut5")
        assert [s["cat"] for s in under] == ["send", "receive"]
        assert all(span in s["name"] for s in under)
        assert all(s["ts"] <= e["ts"] <= s["ts"] + s["dur"] for s, e in zip(under, (start, end), strict=True))


def test_what_an_adapter_decides_is_an_instant_with_its_reason() -> None:
    moment = Interval(
        device="edge", lane="adapter", name="recut [0:2]", step=3, start_s=7.0, end_s=7.0, detail={"reason": "why"}
    )
    trace = Trace(intervals=(interval("edge", "compute", "0F[0:4]", 5.0, 8.0), moment), flows=(), clock="wall")
    page = perfetto_json(trace)
    (instant,) = (event for event in page["traceEvents"] if event["ph"] == "i")
    assert (instant["name"], instant["ts"], instant["s"]) == ("recut [0:2]", 2e6, "t")
    assert instant["args"]["detail"] == {"reason": "why"}
    names = {event["tid"]: event["args"]["name"] for event in page["traceEvents"] if event["name"] == "thread_name"}
    assert names[instant["tid"]] == "adapter"


moments = st.integers(0, 30).map(lambda tick: tick / 7)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    intervals = draw(
        st.lists(
            st.builds(
                lambda device, lane, start_s, length_s: interval(device, lane, "x", start_s, start_s + length_s),
                st.sampled_from(["a", "b"]),
                st.sampled_from(LANES),
                moments,
                moments,
            ),
            max_size=20,
        )
    )
    flow = st.builds(
        lambda at_s: Flow(name="m", source="a", target="c", step=0, sent_s=at_s, received_s=at_s + 1, size_bytes=1),
        moments,
    )
    return Trace(intervals=tuple(intervals), flows=tuple(draw(st.lists(flow, max_size=3))), clock="wall")


@settings(deadline=None, max_examples=50)
@given(trace=traces())
def test_slices_never_overlap_on_a_track(trace: Trace) -> None:
    tracks: dict[tuple[int, int], list[dict]] = {}
    page = perfetto_json(trace)
    for event in slices(page):
        tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    assert sum(map(len, tracks.values())) == sum(interval.lane != "adapter" for interval in trace.intervals)
    for events in tracks.values():
        events.sort(key=lambda event: (event["ts"], event["dur"]))
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(events))
    json.dumps(page)


@settings(deadline=None, max_examples=25)
@given(trace=traces())
def test_a_file_gives_back_what_was_written(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("trace") / "deep" / "trace.json"
    write_atomically(path, json.dumps(perfetto_json(trace)))
    again = read_trace(path)
    key = repr
    assert sorted(again.intervals, key=key) == sorted(trace.intervals, key=key)
    assert (again.flows, again.clock) == (trace.flows, trace.clock)
    assert [entry.name for entry in path.parent.iterdir()] == ["trace.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "not a trace that SpanTrain wrote"),
        ('{"otherData": {"format": "spantrain-trace", "version": 9}}', "trace version 9"),
        ('{"otherData": {"format": "spantrain-trace", "version": 1, "clock": "wall"}}', "needs 'traceEvents'"),
    ],
)
def test_foreign_files_are_refused(content: str, message: str, tmp_path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        read_trace(path)


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"nothing\.json: there is no such file"):
        read_trace(tmp_path / "nothing.json")
