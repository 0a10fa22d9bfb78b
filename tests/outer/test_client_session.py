"""What a cluster's session does when connections come and go, without network and with a clock of its own."""

import threading
from dataclasses import replace
from typing import Any

import pytest

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.layers import divide
from spantrain.outer.client.replica import TakenPush
from spantrain.outer.client.session import ClientSession
from spantrain.outer.client.sessions import FragmentSessions
from spantrain.outer.link.link import MasterWelcome
from spantrain.outer.policy.settings import OuterSettings
from spantrain.outer.rules.nesterov import Nesterov
from spantrain.transport.connection.peers import PeerAddress
from testing.outer.policy import layers_of
from testing.patience import PATIENCE_S

LAYERS = layers_of(2, 3)
S0, S1, S1_AGAIN = (PeerAddress(name=name, endpoint=f"tcp://{port}", public_key="") for name, port in
                    (("s0", "h:1"), ("s1", "h:2"), ("s1", "h:3")))  # fmt: skip
WELCOME = MasterWelcome(
    layout=divide(LAYERS, ("s0", "s1")), rule=Nesterov(), settings=OuterSettings(), peers=(S0, S1)
)  # fmt: skip


class Ends:
    """A link and a wire that note what they are told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.peers: list[tuple[PeerAddress, ...]] = []
        self.changed = threading.Condition()

    def tell(self, *events: Any) -> None:
        with self.changed:
            self.told += events
            self.changed.notify_all()

    def set_peers(self, peers: Any) -> None:
        with self.changed:
            self.peers.append(tuple(peers))
            self.changed.notify_all()

    def until(self, holds: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(holds, PATIENCE_S), (self.told, self.peers)

    def forget(self, ticket: Any) -> None:
        pass

    def close(self) -> None:
        pass


class Loop:
    """A session, and what a training loop does with it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.ends = Ends()
        self.session = ClientSession("a", LAYERS, clock=lambda: self.now_s)
        self.session.connect(self.ends, self.ends)
        self.join()

    def join(self) -> None:
        (registered,) = self.session.joined(WELCOME)
        assert isinstance(registered, on.ClusterRegistered)
        self.session.commanded(do.Welcome(cluster="a", version=1, fate=None, reason="it is new"))

    def is_refused(self) -> None:
        assert self.session.can_push
        self.session.ask(TakenPush(start={}, now={}), tokens=1, took_s=0.0)
        assert self.session.awaits
        self.session.commanded(do.RefusePush(cluster="a", push=None, reason="s1 is away"))
        assert self.session.awaits, "until the loop comes by: it has something to give again"
        assert self.session.take_update().skipped
        assert not self.session.awaits

    def pause_s(self) -> float:
        """Return how long it does not ask; time stands there then."""
        since_s = self.now_s
        while not self.session.can_push:
            self.now_s += 0.25
        return self.now_s - since_s


def test_a_cluster_that_is_refused_asks_more_and_more_rarely_until_a_shard_comes():
    loop = Loop()
    pauses = []
    for _ in range(7):
        loop.is_refused()
        pauses.append(loop.pause_s())
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
    loop.is_refused()
    assert not loop.session.can_push
    loop.session.peers_changed((S0, S1_AGAIN))
    assert loop.pause_s() == 0.0, "at once"
    loop.is_refused()
    assert loop.pause_s() == 0.25, "it restores"
    loop.session.close()


@pytest.mark.parametrize("asked", ["before", "after", "never"])
def test_a_push_that_is_asked_for_is_the_one_that_others_wanted(asked):
    loop = Loop()
    if asked == "before":
        loop.session.ask(TakenPush(start={}, now={}), tokens=1, took_s=0.0)
    loop.session.commanded(do.EndRound(cluster="a", reason="b has ended a round"))
    if asked == "after":
        loop.session.ask(TakenPush(start={}, now={}), tokens=1, took_s=0.0)
    assert loop.session.take_update().round_ended == (asked == "never")
    loop.session.close()


def test_a_master_is_missed_from_the_end_of_its_connection_or_by_what_it_does_not_answer():
    loop = Loop()
    assert loop.session.missed_s == 0.0
    loop.session.data = replace(WELCOME, samples=10, chunks=2)
    loop.now_s = 1.0
    loop.session.ask_for_chunks()
    loop.now_s = 4.0
    assert loop.session.missed_s == 3.0
    loop.session.commanded(do.LeaseNothing(cluster="a", finished=False, reason="all is on lease"))
    assert loop.session.missed_s == 0.0
    loop.session.disconnected("nothing was heard of it")
    loop.now_s = 6.0
    assert loop.session.missed_s == 2.0
    loop.join()
    assert loop.session.missed_s == 0.0
    loop.session.close()


def test_a_new_connection_to_the_master_dials_shards_anew():
    """The connections to them may be of a network that was cut, and be silent for as long as TCP waits."""
    loop = Loop()
    loop.ends.until(lambda: len(loop.ends.peers) == 2)
    loop.session.disconnected("nothing was heard of it")
    loop.join()
    loop.ends.until(lambda: len(loop.ends.peers) == 4)
    assert loop.ends.peers == 2 * [(), (S0, S1)]
    loop.session.close()


def test_a_cluster_that_is_cut_off_takes_part_in_no_fragment(caplog):
    """Where its wire has died, none can be pushed; the first one speaks for all, once."""
    layers = layers_of(2, 3, 1, 4)
    sessions, ends = FragmentSessions("a", layers), Ends()
    sessions.connect(ends, ends)
    welcome = replace(WELCOME, layout=divide(layers, ("s0", "s1"), fragments=2), settings=OuterSettings(fragments=2))
    assert len(sessions.joined(welcome)) == 2
    for number in range(2):
        told = do.Welcome(cluster="a", version=1, fate=None, reason="it is new", fragment=number)
        sessions.commanded(told)
    assert [one.registered for one in sessions.sessions] == [True, True]
    sessions.died("its thread ended")
    assert [one.registered for one in sessions.sessions] == [False, False]
    assert sessions.joined(welcome) == ()
    assert sum("is cut off from all others" in one.message for one in caplog.records) == 1
