"""Pictures of traces: well-formed, a bar for each action, a line for each message."""

from xml.etree import ElementTree

import pytest

from spantrain.app.simulation.schedule import EvenPipeline, show_even
from spantrain.core.trace import Interval, Trace
from spantrain.errors import UsageError
from spantrain.schedule.render.svg import draw_trace

SVG = "{http://www.w3.org/2000/svg}"


def test_every_action_and_message_is_drawn() -> None:
    trace = show_even("zb", EvenPipeline(stages=3, micro_batches=4, transfer_s=0.5)).trace
    picture = ElementTree.fromstring(draw_trace(trace, title="zb < others"))
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert texts[:4] == ["zb < others", "d0", "d1", "d2"]
    drawn = [title.text for title in picture.iter(f"{SVG}title")]
    assert sorted(drawn) == sorted(interval.name for interval in trace.intervals if interval.lane == "compute")
    assert len(list(picture.iter(f"{SVG}line"))) == len(trace.flows) == 2 * 2 * 4


def test_operations_have_their_colours_and_other_work_one_of_its_own() -> None:
    def ran(device: str, name: str, start_s: float) -> Interval:
        return Interval(device=device, lane="compute", name=name, step=0, start_s=start_s, end_s=start_s + 1)

    trace = Trace(
        intervals=(ran("b", "1F[0:1]", 1), ran("a", "0F[0:1]", 0), ran("a", "sum", 2)), flows=(), clock="wall"
    )
    text = draw_trace(trace)
    assert "One measured step, 3.00 s" in text
    assert text.index(">a</text>") < text.index(">b</text>")
    bars = [bar for bar in ElementTree.fromstring(text).iter(f"{SVG}rect") if len(bar)]
    assert [bar.get("fill") for bar in bars] == ["#4c9be8", "#4c9be8", "#b6a6d8"]


def test_a_trace_without_work_is_refused() -> None:
    with pytest.raises(UsageError, match="no work of step 0"):
        draw_trace(Trace(intervals=(), flows=(), clock="wall"))
