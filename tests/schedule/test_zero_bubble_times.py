"""What the original zero-bubble orders are for: the seconds that they save where messages take no time."""

import pytest

from spantrain.app.simulation.schedule import EvenPipeline, show_even


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_seconds_without_communication(stages: int, micro_batches: int) -> None:
    """A stage's bubble is (P − 1)(F + I + W) in 1F1B, (P − 1)(F + I − W) in ZB-H1, and only the shift in ZB."""
    even = EvenPipeline(stages=stages, micro_batches=micro_batches)
    busy_s = 3 * micro_batches
    seconds = {name: show_even(name, even).pipeline_s for name in ("1f1b", "1f1b-asteroid", "zb-h1", "zb")}
    assert seconds["1f1b"] == seconds["1f1b-asteroid"] == busy_s + 3 * (stages - 1)
    assert seconds["zb-h1"] == busy_s + stages - 1
    assert seconds["zb"] == busy_s + stages - 1
    zb = show_even("zb", even)
    for device in zb.peak_samples:
        work = zb.trace.of(device)
        assert work[-1].end_s - work[0].start_s == busy_s, f"{device} waits"


def test_slow_links_leave_fixed_orders_behind() -> None:
    """The case that SpanTrain's figure 6a makes: fixed places of W do not help where messages are slow."""
    slow = EvenPipeline(stages=8, micro_batches=32, transfer_s=2.0, latency_s=1.0)
    shown = {name: show_even(name, slow).ratio_to_bound for name in ("1f1b", "zb-h1", "zb", "compact", "critical-path")}
    assert shown["zb-h1"] == pytest.approx(2.31, abs=0.01)
    assert shown["zb"] == pytest.approx(1.45, abs=0.01)
    assert shown["compact"] == shown["critical-path"] == pytest.approx(1.0)
