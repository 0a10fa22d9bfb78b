"""A device's own adapter: what it knows can be saved, taken up again and carried over a change of plan."""

import json
from dataclasses import replace

import pytest

import four_sites
from spantrain.config.json_codec import from_json, to_json
from spantrain.core.action import Direction, Op
from spantrain.core.plan import Plan, WireFormat
from spantrain.policy.adapter.choice import LocalAdapters, make_local
from spantrain.policy.adapter.local import LocalAdapter, LocalState
from spantrain.policy.monitor import SentMessage
from spantrain.policy.recut import halved

DEVICE, AFTER = "s1r0", "s2r0"


def told(adapter: LocalAdapter, seconds: float, *, begin_s: float) -> None:
    """Eight messages of four samples behind, and eight that come, each so many seconds on its link."""
    for number in range(8):
        at_s = begin_s + number * seconds
        message = SentMessage(peer=AFTER, size_bytes=400, queued_s=at_s, started_s=at_s, acknowledged_s=at_s + seconds)
        adapter.sent(message, 4)
        adapter.received(Direction.FORWARD, 4, seconds)
        adapter.finished(Op.FORWARD, 4, 0.5)


@pytest.mark.parametrize("name", ["auto", "paper", "off"])
def test_a_saved_state_goes_on_as_if_nothing_had_been(name):
    plan = four_sites.plan(0.01)
    first = make_local(name, plan, DEVICE)
    told(first, 1.0, begin_s=0.0)
    text = json.dumps(to_json(first.state))
    again = make_local(name, plan, DEVICE)
    again.take_up(from_json(LocalState, json.loads(text), "a saved state"))
    assert again.state == first.state
    for adapter in (first, again):
        told(adapter, 4.0, begin_s=100.0)
    assert again.state == first.state
    assert again.reports() == first.reports()
    assert again.piece_samples(AFTER, 4) == first.piece_samples(AFTER, 4) == (1 if name == "auto" else 4)


def finer(plan: Plan) -> Plan:
    return replace(plan, stages=tuple(replace(s, micro_batches=halved(s.micro_batches)) for s in plan.stages))


def test_after_a_change_of_micro_batches_the_best_pace_is_still_known():
    plan, adapters = four_sites.plan(0.01), LocalAdapters("auto", DEVICE)
    told(adapters.under(plan), 1.0, begin_s=0.0)
    under = adapters.under(finer(plan))
    told(under, 2.0, begin_s=100.0)
    assert under.piece_samples(AFTER, 4) == 2, "twice as slow as under the plan before"
    assert {report.peer for report in under.reports()} == {AFTER}


def test_after_a_change_of_formats_a_samples_seconds_mean_something_else():
    plan, adapters = four_sites.plan(0.01), LocalAdapters("auto", DEVICE)
    told(adapters.under(plan), 1.0, begin_s=0.0)
    sent = tuple(replace(stage, wire_format=WireFormat.INT8) for stage in plan.stages[:-1])
    rounded = replace(plan, stages=(*sent, plan.stages[-1]))
    state = adapters.under(rounded).state
    assert not state.sending
    assert not state.arriving.last
    assert state.monitor.peers[AFTER].samples, "bytes per second are the same whatever they mean"
