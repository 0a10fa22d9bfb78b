"""A device's own adapter: how fine it cuts, when it stops, and what it still knows after a change of plan."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from spantrain.adaptation.local import AutoLocal, CuttingLocal, LocalAdapter
from spantrain.adaptation.paper import PaperLocal
from spantrain.adaptation.registry import LocalAdapters, make_local
from spantrain.core.action import Action, Direction, Op
from spantrain.core.messages import Arrived, Recut, StepStarted
from spantrain.core.plan import Plan
from spantrain.core.span import Span, equal_spans
from spantrain.core.speed import SentMessage
from spantrain.formats.registry import WireFormat
from spantrain.schedule.dispatch.machine import DispatchMachine, ReplicaTask
from spantrain.schedule.dispatch.recut import halved
from spantrain.schedule.registry import make_policy
from testing import four_sites

DEVICE, BEFORE, AFTER = "s1r0", "s0r0", "s2r0"
SAMPLES, SIZE = 128, 8


def told(adapter: LocalAdapter, sample_s: float, *, begin_s: float, messages: int = 8, peer: str = AFTER) -> None:
    """A step of messages of four samples to a peer, one behind the other; as many come from the other side."""
    adapter.heard(begin_s, StepStarted(0))
    for number in range(messages):
        at_s = begin_s + 4 * number * sample_s
        message = SentMessage(
            peer=peer, size_bytes=400, queued_s=at_s, started_s=at_s, acknowledged_s=at_s + 4 * sample_s
        )
        adapter.sent(message, 4)
        adapter.received(Direction.FORWARD, 4, at_s + 4 * sample_s)


def worked(adapter: LocalAdapter, fixed_s: float, sample_s: float) -> None:
    """F, I and W of four samples and of eight."""
    for op in (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT):
        for samples in (4, 8):
            adapter.finished(op, samples, (fixed_s + samples * sample_s) / 3)


def begun() -> DispatchMachine:
    """A replica of the second of four stages at the begin of its step."""
    policy = make_policy(
        "critical-path", ReplicaTask(stage=1, num_stages=4, spans=equal_spans(SAMPLES, SIZE), in_flight_limit=SAMPLES)
    )
    policy.on_event(0.0, StepStarted(0))
    return policy


def sizes_after(adapter: CuttingLocal, policy: DispatchMachine) -> set[int]:
    """Of the micro-batches that have not begun, when the adapter has had its say."""
    recut = adapter.recut(0.0, policy)
    if recut is not None:
        policy.on_event(0.0, recut)
    return {span.size for span in policy.unbegun}


def calm(kind: type[AutoLocal | PaperLocal]) -> AutoLocal | PaperLocal:
    """An adapter that knows what calm links do: a sample takes 0.1 s of them."""
    adapter = kind(after=(AFTER,))
    for step in range(4):
        told(adapter, 0.1, begin_s=100.0 * step)
        told(adapter, 0.1, begin_s=100.0 * step + 50, peer=BEFORE)
    return adapter


@pytest.mark.parametrize(
    ("fixed_s", "sample_s", "link_s", "size"),
    [
        (0.1, 0.1, 0.1, 8),  # calm
        (0.1, 0.1, 0.204, 1),  # one sample's work takes as long as its way
        (0.2, 0.1, 0.204, 2),
        (0.4, 0.1, 0.204, 4),
        (0.9, 0.1, 0.204, 8),  # even two halves would take longer
        (0.1, 0.3, 0.204, 8),  # work is the limit in any case
    ],
)
def test_a_device_cuts_as_fine_as_its_work_stays_shorter_than_the_way(fixed_s, sample_s, link_s, size):
    adapter, policy = calm(AutoLocal), begun()
    worked(adapter, fixed_s, sample_s)
    told(adapter, link_s, begin_s=1000.0)
    assert sizes_after(adapter, policy) == {size}


def test_what_was_cut_is_put_together_again_when_the_link_is_calm():
    adapter, policy = calm(AutoLocal), begun()
    worked(adapter, 0.1, 0.1)
    told(adapter, 0.3, begin_s=1000.0)
    assert sizes_after(adapter, policy) == {1}
    told(adapter, 0.1, begin_s=1100.0)
    policy = begun()
    assert sizes_after(adapter, policy) == {8}
    assert adapter.recut(0.0, policy) is None


def test_in_mid_step_too_and_what_has_begun_stays():
    adapter, policy = calm(AutoLocal), begun()
    worked(adapter, 0.1, 0.1)
    told(adapter, 0.3, begin_s=1000.0)
    assert sizes_after(adapter, policy) == {1}
    (command,) = policy.on_event(0.1, Arrived(Direction.FORWARD, Span(0, 12)))
    assert command.action == Action(1, Op.FORWARD, Span(0, 1))
    told_on(adapter, 0.1)
    recut = adapter.recut(0.2, policy)
    assert recut is not None
    policy.on_event(0.2, recut)
    assert policy.unbegun == (Span(1, 8), *equal_spans(SAMPLES, SIZE)[1:])
    assert "calm" in recut.reason


def told_on(adapter: LocalAdapter, sample_s: float) -> None:
    """More messages of the same step."""
    for number in range(8):
        at_s = 2000.0 + 4 * number * sample_s
        message = SentMessage(
            peer=AFTER, size_bytes=400, queued_s=at_s, started_s=at_s, acknowledged_s=at_s + 4 * sample_s
        )
        adapter.sent(message, 4)
        adapter.received(Direction.FORWARD, 4, at_s + 4 * sample_s)


def test_a_slow_link_far_away_shows_in_what_comes():
    adapter, policy = calm(AutoLocal), begun()
    worked(adapter, 0.1, 0.1)
    adapter.heard(1000.0, StepStarted(0))
    for number in range(8):
        adapter.received(Direction.FORWARD, 4, 1000.0 + number * 4 * 0.3)
    assert sizes_after(adapter, policy) == {1}
    assert adapter.piece_samples(AFTER, 4) == 4, "its own link is calm"


def test_what_comes_evenly_over_slow_links_does_not_make_the_fits_and_starts_of_calm_ones_slow():
    """Samples come from busy devices at unlike times; over a slow link one comes every 0.2 s."""
    adapter = calm(AutoLocal)
    worked(adapter, 0.1, 0.1)
    calm_gaps, slow_gaps = (0.1, 0.3, 0.3, 0.3, 0.1, 0.1) * 2, (0.2,) * 12
    for step, (gaps, link_s) in enumerate([(calm_gaps, 0.1), *[(slow_gaps, 0.2)] * 3, *[(calm_gaps, 0.1)] * 3]):
        at_s = 1000.0 * (step + 1)
        told(adapter, link_s, begin_s=at_s)
        for gap_s in gaps:
            at_s += 4 * gap_s
            adapter.received(Direction.BACKWARD, 4, at_s + 500)
        sizes = sizes_after(adapter, begun())
    assert sizes == {SIZE}


@pytest.mark.parametrize("kind", [AutoLocal, PaperLocal])
def test_a_line_that_others_use_at_times_is_not_slow(kind):
    """In each step some messages have the line to themselves and some share it."""
    adapter, policy = kind(after=(AFTER,)), begun()
    for step in range(6):
        told(adapter, 0.1, begin_s=1000.0 * step, messages=24)
        worked(adapter, 0.01, 0.01)
        for number in range(24):
            at_s = 1000.0 * step + 500 + 0.8 * number
            adapter.sent(
                SentMessage(peer=AFTER, size_bytes=400, queued_s=at_s, started_s=at_s, acknowledged_s=at_s + 0.8), 4
            )
            if step:
                assert sizes_after(adapter, policy) == {8}


@pytest.mark.parametrize("peer", [AFTER, BEFORE])
def test_the_papers_adapter_halves_behind_delayed_sends_in_either_direction_and_until_they_are_in_time(peer):
    adapter, policy = calm(PaperLocal), begun()
    assert sizes_after(adapter, policy) == {8}
    told(adapter, 0.2, begin_s=1000.0, messages=20, peer=peer)
    other = BEFORE if peer == AFTER else AFTER
    assert (adapter.piece_samples(peer, 8), adapter.piece_samples(other, 8)) == (4, 8)
    assert sizes_after(adapter, policy) == {4}
    assert sizes_after(adapter, begun()) == {8}, "it has been looked at in this step"
    told(adapter, 0.1, begin_s=2000.0, messages=20, peer=peer)
    assert adapter.piece_samples(peer, 8) == 8
    assert sizes_after(adapter, begun()) == {8}


def test_the_papers_adapter_looks_at_twenty_messages():
    adapter, policy = calm(PaperLocal), begun()
    told(adapter, 0.2, begin_s=1000.0, messages=9)
    assert sizes_after(adapter, policy) == {8}, "most of the last 20 were in time"
    told(adapter, 0.2, begin_s=1100.0, messages=2)
    assert sizes_after(adapter, policy) == {4}


def test_a_starving_device_begins_with_what_has_come_where_work_is_the_limit():
    adapter, policy = calm(AutoLocal), begun()
    worked(adapter, 0.01, 0.3)
    told(adapter, 0.204, begin_s=1000.0)
    assert adapter.recut(1030.0, policy) is None, "nothing of it has come"
    policy.on_event(1030.0, Arrived(Direction.FORWARD, Span(0, 4)))
    adapter.received(Direction.FORWARD, 4, 1030.0)
    recut = adapter.recut(1030.0, policy)
    assert recut is not None
    assert recut.spans == (Span(0, 4), Span(4, 8))
    assert "wins" in recut.reason


@pytest.mark.parametrize("name", ["auto", "paper", "off"])
def test_an_adapter_that_takes_over_goes_on_as_if_nothing_had_been(name):
    plan, adapters = four_sites.plan(0.01), LocalAdapters(name, DEVICE)
    whole, first = make_local(name, plan, DEVICE), adapters.under(plan)
    for adapter in (whole, first):
        told(adapter, 0.1, begin_s=0.0)
        worked(adapter, 0.1, 0.1)
    again = adapters.under(plan)
    for adapter in (whole, again):
        told(adapter, 0.4, begin_s=100.0)
    assert again.reports() == whole.reports()
    assert again.piece_samples(AFTER, 4) == whole.piece_samples(AFTER, 4) == (1 if name == "auto" else 4)


def finer(plan: Plan) -> Plan:
    return replace(plan, stages=tuple(replace(s, micro_batches=halved(s.micro_batches)) for s in plan.stages))


def under(plans: Iterator[Plan], sample_s: Iterator[float]) -> LocalAdapter:
    """The last plan's adapter, after a step of each."""
    adapters = LocalAdapters("auto", DEVICE)
    for number, (plan, seconds) in enumerate(zip(plans, sample_s, strict=True)):
        adapter = adapters.under(plan)
        told(adapter, seconds, begin_s=100.0 * number)
    return adapter


def test_after_a_change_of_micro_batches_the_calm_pace_is_still_known_and_the_present_one_is_not():
    plan = four_sites.plan(0.01)
    slow = under(iter((plan, plan, finer(plan))), iter((0.1, 0.1, 0.2)))
    assert slow.piece_samples(AFTER, 4) == 2, "twice as slow as under the plan before"
    assert {report.peer for report in slow.reports()} == {AFTER}
    adapters = LocalAdapters("auto", DEVICE)
    for number, seconds in enumerate((0.1, 0.1, 0.4)):
        told(adapters.under(plan), seconds, begin_s=100.0 * number)
    assert adapters.under(finer(plan)).piece_samples(AFTER, 4) == 4, "nothing of this plan has been sent"


def test_after_a_change_of_formats_a_samples_seconds_mean_something_else():
    plan, adapters = four_sites.plan(0.01), LocalAdapters("auto", DEVICE)
    told(adapters.under(plan), 0.1, begin_s=0.0)
    sent = tuple(replace(stage, wire_format=WireFormat.INT8) for stage in plan.stages[:-1])
    rounded = replace(plan, stages=(*sent, plan.stages[-1]))
    adapter = adapters.under(rounded)
    (report,) = adapter.reports()
    assert report.messages, "bytes per second are the same whatever they mean"
    for step in range(2):
        told(adapter, 0.4, begin_s=100.0 * (step + 1))
    assert adapter.piece_samples(AFTER, 4) == 4, "no pace is known of these formats that would be calmer"


def test_a_recut_says_why():
    adapter, policy = calm(AutoLocal), begun()
    worked(adapter, 0.1, 0.1)
    told(adapter, 0.3, begin_s=1000.0)
    recut = adapter.recut(0.0, policy)
    assert isinstance(recut, Recut)
    assert "a sample takes 299.8 ms of a slow link, its work in micro-batches of 1 203.0 ms" in recut.reason
