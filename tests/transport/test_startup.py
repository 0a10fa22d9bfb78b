"""Beginnings and ends in good order: admit, meet, dial, part; nothing is refused and nothing is lost."""

from dataclasses import replace

import pytest
import torch

from spantrain.transport.connection.peers import KeyPair
from spantrain.transport.mailbox.mailbox import Mailbox

ONES = torch.ones(3)
LARGE = torch.ones(100_000)


@pytest.fixture
def open_mailbox(make_mailbox, patient):
    """With such patience that a second dialling is never for want of time."""
    return lambda name: make_mailbox(name, patient)


def admit(mailboxes, generation=1, **options):
    for mailbox in mailboxes:
        mailbox.set_peers(generation, [other.address for other in mailboxes], **options)


def send_all(mailboxes, key, collect, generation=1):
    for source in mailboxes:
        for target in mailboxes:
            if source is not target:
                source.send(target.name, key(generation=generation), [ONES])
                source.send(target.name, key(generation=generation), [LARGE])
    for mailbox in mailboxes:
        collect(mailbox, 2 * (len(mailboxes) - 1))


def refused(mailboxes):
    return [dict(mailbox.counters().refused) for mailbox in mailboxes]


def reconnections(mailboxes):
    return sum(peer.reconnections for mailbox in mailboxes for peer in mailbox.counters().peers.values())


def test_nobody_is_refused_where_all_admit_before_one_dials(open_mailbox, key, collect):
    mailboxes = [open_mailbox(name) for name in "abcd"]
    admit(mailboxes, dial=False)
    for mailbox in mailboxes:
        mailbox.dial()
    send_all(mailboxes, key, collect)
    for mailbox in mailboxes:
        mailbox.dial()
    send_all(mailboxes, key, collect)
    assert refused(mailboxes) == [{}] * 4
    assert reconnections(mailboxes) == 0


def test_what_is_held_back_waits_and_is_not_lost(open_mailbox, key, collect):
    a, b = open_mailbox("a"), open_mailbox("b")
    admit([a, b], dial=False)
    a.send("b", key(), [ONES])
    b.send("a", key(), [ONES])
    assert a.receive(0.05) == b.receive(0.05) == []
    b.dial()  # it is the other side that dials
    assert a.receive(0.05) == []
    a.dial()
    collect(a, 1)
    collect(b, 1)


def test_some_may_be_dialled_and_others_later(open_mailbox, key, collect):
    a, b, c = mailboxes = [open_mailbox(name) for name in "abc"]
    admit(mailboxes, dial=False)
    for target in "bc":
        a.send(target, key(), [ONES])
    with pytest.raises(ValueError, match="z is not among"):
        a.dial("z")
    a.dial(["b"])
    collect(b, 1)
    assert c.receive(0.05) == []
    a.dial(["c"])
    collect(c, 1)
    assert refused(mailboxes) == [{}] * 3


def test_peers_that_stay_keep_their_connections_whatever_is_held_back(open_mailbox, key, collect):
    a, b, _ = mailboxes = [open_mailbox(name) for name in "abc"]
    admit([a, b], dial=False)
    for mailbox in (a, b):
        mailbox.dial()
    send_all([a, b], key, collect)
    admit(mailboxes, generation=2, dial=False)
    send_all([a, b], key, collect, generation=2)
    for mailbox in mailboxes:
        mailbox.dial()
    send_all(mailboxes, key, collect, generation=2)
    assert refused(mailboxes) == [{}] * 3
    assert reconnections(mailboxes) == 0


def test_peers_part_and_meet_again_and_nobody_is_refused(open_mailbox, key, collect):
    a, b, c = mailboxes = [open_mailbox(name) for name in "abc"]
    admit([a, b], dial=False)
    a.dial()
    send_all([a, b], key, collect)
    for pair in ([a, c], [c, b]):  # the third one still thinks of the round before
        admit(pair, dial=False)
        for mailbox in pair:
            mailbox.dial()
        send_all(pair, key, collect)
    admit(mailboxes, generation=2, dial=False)
    for mailbox in mailboxes:
        mailbox.dial()
    send_all(mailboxes, key, collect, generation=2)
    c.close()
    b.close()
    send_b = a.send("b", key(generation=2), [ONES])
    assert send_b
    assert refused(mailboxes) == [{}] * 3


def test_a_side_that_does_not_dial_does_not_care_for_a_new_endpoint(collect, key, patient):
    keys = {name: KeyPair.generate() for name in "ab"}
    a, b = (Mailbox(name=name, keypair=keys[name], limits=patient) for name in "ab")
    admit([a, b], dial=False)
    a.dial()
    send_all([a, b], key, collect)
    b.set_peers(2, [replace(a.address, endpoint="tcp://10.9.9.9:1")])
    a.set_peers(2, [b.address])
    send_all([a, b], key, collect, generation=2)
    assert reconnections([a, b]) == 0
    a.close()
    b.close()


@pytest.mark.parametrize("first", ["a", "b"])
def test_an_end_in_good_order_is_not_counted(collect, key, patient, first):
    a, b = mailboxes = [Mailbox(name=name, limits=patient) for name in "ab"]
    admit(mailboxes, dial=False)
    a.dial()
    send_all(mailboxes, key, collect)
    left, stays = (a, b) if first == "a" else (b, a)
    left.close()
    stays.close()
    assert refused(mailboxes) == [{}] * 2
