"""What every mailbox does, with and without encryption, over sockets and in memory."""

import contextlib
import socket
import threading

import pytest
import torch

from spantrain.errors import PeerLostError, ProtocolError
from spantrain.transport.mailbox.interface import Limits
from spantrain.transport.mailbox.mailbox import Mailbox
from testing.patience import PATIENCE_S, until

MB = 1_000_000


def introduce(*mailboxes, generation=1):
    """Who is dialled, by its name, knows of who dials first: a plain hello that comes before waits for another dial."""
    for mailbox in sorted(mailboxes, key=lambda one: one.address.name, reverse=True):
        mailbox.set_peers(generation, [other.address for other in mailboxes])


def test_tensors_arrive_as_they_were_in_both_directions(make_mailbox, key, collect, tensors):
    a, b = make_mailbox("a"), make_mailbox("b")
    introduce(a, b)
    for source, target in ((a, b), (b, a)):
        assert source.send(target.name, key(7), tensors)
        (message,) = collect(target, 1)
        assert (message.source, message.key) == (source.name, key(7))
        assert message.size_bytes == sum(tensor.nbytes for tensor in tensors)
        for got, sent in zip(message.tensors, tensors, strict=True):
            assert got.dtype == sent.dtype
            assert got.shape == sent.shape
            assert torch.equal(got, sent)


def test_tensors_arrive_over_ipv6(key, collect, tensors):
    if not has_ipv6():
        pytest.skip("needs an IPv6 loopback")
    a, b = (Mailbox(name=name, bind="tcp://[::1]:0") for name in "ab")
    with contextlib.closing(a), contextlib.closing(b):
        introduce(a, b)
        assert a.send("b", key(7), tensors)
        assert collect(b, 1)[0].key == key(7)


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


def test_what_arrived_can_be_written_to(make_mailbox, key, collect):
    a, b = make_mailbox("a"), make_mailbox("b")
    introduce(a, b)
    sent = torch.zeros(100_000)
    a.send("b", key(), [sent, sent])
    (message,) = collect(b, 1)
    message.tensors[0].add_(1)
    assert message.tensors[0].sum() == 100_000
    assert message.tensors[1].sum() == sent.sum() == 0


def test_every_message_comes_once_whatever_its_size(make_mailbox, key, collect):
    a, b = make_mailbox("a"), make_mailbox("b")
    introduce(a, b)
    sizes = [0, 1, 16_000, 32_768, 32_769, 131_072, 131_073, 262_144, 3 * MB] * 4
    lanes = ["forward", "backward", "tied:wte"]
    for step, size in enumerate(sizes):
        a.send("b", key(step, lanes[step % 3]), [torch.full((size,), step, dtype=torch.uint8)])
    messages = collect(b, len(sizes))
    assert sorted(message.key.step for message in messages) == list(range(len(sizes)))
    for message in messages:
        assert message.size_bytes == sizes[message.key.step]
        assert (message.tensors[0] == message.key.step).all()
    assert b.receive(0) == []
    assert b.counters().peers["a"].messages_received == len(sizes)
    assert b.counters().peers["a"].payload_bytes_received == a.counters().peers["b"].payload_bytes_sent == sum(sizes)


def test_a_full_queue_slows_the_sender_and_drops_nothing(make_mailbox, key, collect):
    limits = Limits(max_message_bytes=MB, send_queue_bytes=2 * MB, receive_queue_bytes=2 * MB)
    a, b = make_mailbox("a", limits), make_mailbox("b", limits)
    introduce(a, b)
    piece = torch.zeros(MB // 2, dtype=torch.uint8)
    accepted = 0
    while a.send("b", key(accepted), [piece], timeout_s=0.2):
        accepted += 1
        assert accepted < 50, "nothing holds the sender back"
    assert accepted * MB // 2 <= limits.send_queue_bytes + limits.receive_queue_bytes
    assert a.counters().peers["b"].send_stall_s >= 0.2
    sender = threading.Thread(target=lambda: [a.send("b", key(step), [piece]) for step in range(accepted, 20)])
    sender.start()
    assert sorted(message.key.step for message in collect(b, 20)) == list(range(20))
    sender.join()


def test_a_message_of_the_largest_size_always_finds_credit(make_mailbox, key, collect):
    limits = Limits(max_message_bytes=MB, send_queue_bytes=8 * MB, receive_queue_bytes=2 * MB)
    a, b = make_mailbox("a", limits), make_mailbox("b", limits)
    introduce(a, b)
    sizes = [MB, 300_000, MB, 1, 900_000, MB, 500_000]
    for step, size in enumerate(sizes):
        assert a.send("b", key(step), [torch.zeros(size, dtype=torch.uint8)])
    assert len(collect(b, len(sizes))) == len(sizes)


def test_a_message_over_the_limit_is_the_senders_error(make_mailbox, key):
    a, b = make_mailbox("a", Limits(max_message_bytes=MB, receive_queue_bytes=2 * MB)), make_mailbox("b")
    introduce(a, b)
    with pytest.raises(ValueError, match="at most 1000000"):
        a.send("b", key(), [torch.zeros(MB + 1, dtype=torch.uint8)])
    with pytest.raises(ValueError, match="complex128"):
        a.send("b", key(), [torch.zeros(1, dtype=torch.complex128)])


def test_older_generations_are_dropped_and_newer_ones_wait(make_mailbox, key, collect):
    a, b = make_mailbox("a"), make_mailbox("b")
    introduce(a, b)
    a.set_peers(2, [b.address])
    a.send("b", key(1, generation=2), [torch.ones(3)])
    b.send("a", key(2, generation=1), [torch.ones(3)])
    until(lambda: a.counters().refused.get("old generation") == 1)
    until(lambda: b.counters().peers["a"].messages_received == 1)
    assert b.receive(0) == []
    b.set_peers(2, [a.address])
    assert [message.key.step for message in collect(b, 1)] == [1]
    assert a.receive(0) == []
    assert a.send("b", key(3, generation=1), [torch.ones(3)])
    assert a.counters().refused["old generation, not sent"] == 1


def test_the_next_generation_starts_with_nothing_of_the_last(make_mailbox, key, collect):
    a, b = make_mailbox("a"), make_mailbox("b")
    introduce(a, b)
    a.send("b", key(1), [torch.ones(3)])
    until(lambda: b.counters().peers["a"].messages_received == 1)
    introduce(a, b, generation=2)
    a.send("b", key(2, generation=2), [torch.ones(3)])
    assert [message.key.step for message in collect(b, 1)] == [2]
    assert b.counters().refused["old generation"] == 1


def test_a_peer_that_leaves_and_returns_is_heard_again(make_mailbox, key, collect):
    a, b, c = make_mailbox("a"), make_mailbox("b"), make_mailbox("c")
    introduce(a, b, c)
    a.send("b", key(1), [torch.ones(3)])
    collect(b, 1)
    b.set_peers(2, [c.address])
    with pytest.raises(PeerLostError, match="generation 2"):
        b.send("a", key(generation=2), [torch.ones(1)])
    introduce(a, b, c, generation=3)
    for source, target in ((a, b), (b, a), (c, a), (b, c)):
        source.send(target.name, key(5, generation=3), [torch.ones(3)])
        assert [message.key.step for message in collect(target, 1)] == [5]


def test_generations_do_not_go_back(make_mailbox):
    a = make_mailbox("a")
    a.set_peers(3, [])
    with pytest.raises(ValueError, match="older than 3"):
        a.set_peers(2, [])


def test_wake_ends_a_wait(make_mailbox):
    a = make_mailbox("a")
    waker = threading.Timer(0.05, a.wake)
    waker.start()
    assert a.receive(None) == []
    waker.join()
    assert a.receive(0) == []


def test_close_ends_a_wait(make_mailbox):
    a = make_mailbox("a")
    closer = threading.Timer(0.05, a.close)
    closer.start()
    with pytest.raises(ProtocolError, match="closed"):
        a.receive(None)
    closer.join()
    with pytest.raises(ProtocolError, match="closed"):
        a.receive(0)


def test_sent_intervals_are_reported_once_and_in_order(make_mailbox, key, collect):
    a, b = make_mailbox("a"), make_mailbox("b")
    introduce(a, b)
    for step in range(3):
        a.send("b", key(step), [torch.ones(1000)])
    collect(b, 3)
    intervals = []
    until(lambda: intervals.extend(a.sent_intervals()) or len(intervals) == 3)
    assert {interval.key.step for interval in intervals} == {0, 1, 2}
    for interval in intervals:
        assert (interval.peer, interval.size_bytes) == ("b", 4000)
        assert interval.queued_s <= interval.started_s <= interval.acknowledged_s
    assert a.sent_intervals() == []


def test_as_many_connections_as_limits_allow_can_be_made(make_mailbox, key, collect):
    limits = Limits(bulk_connections=16, welcome_s=PATIENCE_S)
    a, b = make_mailbox("a", limits), make_mailbox("b", limits)
    introduce(a, b)
    assert a.send("b", key(1), [torch.zeros(100_000)])
    assert collect(b, 1)[0].size_bytes == 400_000
