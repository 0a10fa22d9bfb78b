"""Who has joined as which device, who is lost, and what workers may say of themselves."""

from dataclasses import replace

import pytest

from spantrain.runtime.control.orders import ConnectOrder
from spantrain.runtime.control.requests import Introduction, OrderFailure, OrderOutcome
from spantrain.runtime.coordinator.roster import Departure, Roster, error_of, printable
from spantrain.transport.connection.peers import PeerAddress
from spantrain.transport.control.protocol import RemoteRefusal

PATIENCE_S = 6.0
HERE = Introduction(endpoint="tcp://10.0.0.7:4711", public_key="k" * 40)
ORDER = ConnectOrder(generation=0, peers=())


def roster(*joined: str) -> Roster:
    """Of devices a and b; those named have joined at time 0."""
    found = Roster(("a", "b"), PATIENCE_S)
    for peer in joined:
        found.join(0.0, peer)
        found.introduce(peer, HERE)
    return found


def test_who_has_joined_and_said_where_it_is_stands_for_its_device():
    found = roster("a")
    assert found.join(0.0, "rank-1") == "b"
    assert found.missing(("a", "b")) == ["b"], "it has not said where it is"
    found.introduce("rank-1", HERE)
    assert found.missing(("a", "b")) == []
    assert found["b"].address == PeerAddress(name="b", endpoint=HERE.endpoint, public_key=HERE.public_key)


def test_those_of_one_site_are_told_where_it_is_reached_there():
    found = Roster(("a", "b"), PATIENCE_S, {"a": "lab", "b": "home", "c": "lab"})
    relayed = replace(HERE, near="tcp://192.168.0.7:1")
    for peer in "abc":
        found.join(0.0, peer)
        found.introduce(peer, relayed)
    a, b, c = (found[name].address for name in "abc")
    assert (a.site, b.site) == ("lab", "home")
    assert a.seen_from(c).endpoint == "tcp://192.168.0.7:1"
    assert a.seen_from(b).endpoint == HERE.endpoint
    assert roster("a")["a"].address.near == "", "where sites are not known"
    with pytest.raises(RemoteRefusal, match="an endpoint looks like"):
        found.introduce("a", replace(HERE, near="rm -rf"))


@pytest.mark.parametrize(
    ("peer", "says"),
    [("c", "no device c here; this run has a, b"), ("rank-2", "ranks 0 to 1"), ("rank-x", "ranks 0 to 1")],
)
def test_only_devices_of_the_run_join(peer, says):
    with pytest.raises(RemoteRefusal, match=says):
        roster().join(0.0, peer)


@pytest.mark.parametrize("peer", ["a", "rank-0"])
def test_a_device_that_is_heard_keeps_its_place(peer):
    found = roster("a")
    found.heard(5.0, "a")
    with pytest.raises(RemoteRefusal, match=r"a has joined already and was heard 1\.9 s ago"):
        found.join(6.9, peer)


@pytest.mark.parametrize("peer", ["a", "rank-0"])
def test_one_that_is_silent_while_others_are_awaited_gives_its_place_to_who_comes(peer):
    found = roster("a")
    assert found.may_replace(2.1, "a")
    assert found.join(2.1, peer) == "a"
    assert found.missing(("a",)) == ["a"]
    assert found.departures(2.1) == [], "its place was never free"
    found.introduce(peer, HERE)
    assert found.missing(("a",)) == []


def test_one_that_was_told_to_leave_is_replaced_at_once_and_one_that_was_not_is_not():
    found = roster("a", "b")
    found["a"].dismissed = True
    assert [found.may_replace(0.1, peer) for peer in "ab"] == [True, False]
    assert found.join(0.1, "a") == "a"
    with pytest.raises(RemoteRefusal, match="device b has joined already"):
        found.join(0.1, "b")
    assert not found["a"].dismissed
    found["a"].order = (0, ORDER)
    found["a"].dismissed = True
    assert not found.may_replace(0.2, "a"), "it has work"


def test_one_that_has_work_is_not_replaced_before_it_is_lost():
    found = roster("a")
    found["a"].order = 0, ORDER
    assert not found.may_replace(5.9, "a")
    with pytest.raises(RemoteRefusal, match="joined already"):
        found.join(5.9, "a")
    assert [one.device for one in found.departures(6.1)] == ["a"]
    assert found.join(6.1, "a") == "a"


def test_who_is_silent_for_too_long_is_gone_once_and_its_certificate_is_nobodys():
    found = roster("a", "rank-1")
    found.heard(4.0, "a")
    assert found.departures(6.1) == [Departure(device="b", peer="rank-1", reason="no heartbeat for 6.1 s, limit 6.0 s")]
    assert found.departures(6.2) == []
    assert found.missing(("a", "b")) == ["b"]
    for call in (found.of, lambda peer: found.heard(6.3, peer), lambda peer: found.introduce(peer, HERE)):
        with pytest.raises(RemoteRefusal, match="rank-1 is not a member"):
            call("rank-1")


def test_who_goes_by_itself_says_why():
    found = roster("a")
    found.depart("a", "it was stopped on its machine\x1b[2J")
    found.depart("a", "twice")
    (gone,) = found.departures(0.1)
    assert gone.reason == "it was stopped on its machine\N{REPLACEMENT CHARACTER}[2J"
    assert found.join(0.2, "a") == "a"


def test_who_has_not_said_where_it_is_has_no_say():
    found = roster()
    found.join(0.0, "a")
    with pytest.raises(RemoteRefusal, match="has not introduced itself"):
        found.of("a")


def test_nobody_becomes_somebody_else():
    found = roster("a")
    found.introduce("a", HERE)
    with pytest.raises(RemoteRefusal, match="as somebody else"):
        found.introduce("a", replace(HERE, endpoint="tcp://10.6.6.6:1"))


def test_what_becomes_of_an_order_is_told_once():
    found = roster("a")
    member = found["a"]
    member.note_outcome(OrderOutcome(order_id=0, result=1))
    assert member.outcome is None, "it has no order"
    member.order = 7, ORDER
    member.note_outcome(OrderOutcome(order_id=6, result=1))
    assert member.is_busy
    member.note_outcome(OrderOutcome(order_id=7, failure=OrderFailure(error="no\x07")))
    member.note_outcome(OrderOutcome(order_id=7, result=1))
    failure = OrderFailure(error="no\N{REPLACEMENT CHARACTER}")
    assert member.outcome == OrderOutcome(order_id=7, failure=failure)
    assert str(error_of("a", failure, "with a")).endswith("its log: with a")


def test_what_others_say_is_fit_for_a_terminal():
    assert printable("first\nsecond\r\x1b]0;title\x07") == "first\nsecond" + "\N{REPLACEMENT CHARACTER}" * 2 + (
        "]0;title\N{REPLACEMENT CHARACTER}"
    )
    assert len(printable("x" * 10**6)) == 2000
