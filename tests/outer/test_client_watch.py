"""A cluster whose versions stop says so, by its own rounds: once and then seldom, what for, and when that is over."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from spantrain.core.outer import commands as do
from spantrain.core.outer.events import LayerTransfer, Ticket
from spantrain.core.outer.layers import divide
from spantrain.outer.client.optimizer import OuterOptimizer
from spantrain.outer.client.replica import TakenPush
from spantrain.outer.client.rounds import VersionWatch
from spantrain.outer.client.session import ClientSession
from spantrain.outer.link.link import MasterWelcome
from spantrain.outer.local import LocalParameterServer
from spantrain.outer.master.config import MasterConfig
from spantrain.outer.policy.settings import OuterSettings
from spantrain.outer.rules.nesterov import Nesterov
from spantrain.transport.layers.loop import LayerLoop
from testing.outer.policy import layers_of
from testing.patience import PATIENCE_S

LAYERS = layers_of(2, 3)
WELCOME = MasterWelcome(layout=divide(LAYERS, ("s0", "s1")), rule=Nesterov(), settings=OuterSettings(), peers=())


class Ends:
    """A link and a wire that do nothing."""

    problem: str | None = None
    """Why there is no connection."""

    def tell(self, *events: object) -> None:
        pass

    def set_peers(self, peers: object) -> None:
        pass

    def close(self) -> None:
        pass


class Loop:
    """A session, a watch and a clock: an inner step takes a second."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.session = ClientSession("a", LAYERS, clock=lambda: self.now_s)
        self.session.connect(Ends(), Ends())
        self.watch = VersionWatch(self.session, inner_steps=20, clock=lambda: self.now_s)
        (self.registered,) = self.session.joined(WELCOME)
        self.session.commanded(do.Welcome(cluster="a", version=1, fate=None, reason="it is new"))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.now_s += 1.0
            self.session.stepped()
            self.watch.step()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING, logger="spantrain.outer.client.rounds")

    def take() -> list[str]:
        texts = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return texts

    return take


def test_nothing_is_said_of_rounds_as_they_are(said):
    loop = Loop()
    for version in range(1, 9):
        loop.steps(20 + 5 * (version % 3))
        loop.watch.came(version)
    assert not said()
    loop.session.close()


def test_a_version_that_does_not_come_is_told_once_and_seldom_and_so_is_its_end(said):
    loop = Loop()
    for version in range(1, 4):
        loop.steps(30)
        loop.watch.came(version)
    loop.steps(90)
    assert not said()
    loop.steps(1)
    (text,) = said()
    assert text == (
        "cluster a has had no new version for 91 inner steps (91 s), usually it takes 30: it trains on from version 3 "
        "by itself, and waits for its round to end"
    )
    loop.steps(90)
    assert not said()
    loop.steps(1)
    assert len(said()) == 1
    loop.watch.came(4)
    assert said() == ["cluster a has version 4, after 182 inner steps (182 s)"]
    loop.steps(180)
    assert not said(), "what was late is no measure of what is usual, but for three times that"
    loop.session.close()


def test_fast_rounds_are_not_late_before_a_member_would_be_lost(said):
    loop = Loop()
    for _ in range(2000):
        loop.now_s += 0.004
        loop.watch.step()
    assert not said()
    loop.now_s += 3.0
    loop.watch.step()
    assert len(said()) == 1, "10 s, as `lost_after` says"
    loop.session.close()


def test_time_that_it_stands_still_counts_for_the_steps_of_that_time(said):
    loop = Loop()
    loop.steps(40)
    for _ in range(2):
        loop.now_s += 10.0
        loop.watch.waited(10.0)
    assert not said()
    loop.now_s += 1.0
    loop.watch.waited(1.0)
    assert len(said()) == 1
    loop.session.close()


def test_what_it_waits_for_is_named():
    loop = Loop()
    session, push = loop.session, Ticket(1, 1)

    def transfer(ticket: Ticket, layer: int) -> LayerTransfer:
        return LayerTransfer(ticket=ticket, cluster="a", worker="a", layer=layer, shard=f"s{layer}", size_bytes=4)

    assert session.waits_for() == "its round to end"
    session.ask(TakenPush(start={}, now={}), tokens=1, took_s=0.0)
    assert session.waits_for() == "the master's answer to a push"
    session.commanded(do.RefusePush(cluster="a", push=None, reason="not ready: s1"))
    assert session.waits_for() == "a push, which came to nothing: not ready: s1"
    session.take_update()
    loop.now_s += 10.0
    session.ask(TakenPush(start={}, now={}), tokens=1, took_s=0.0)
    session.commanded(do.StartPush(cluster="a", push=push, parameters=False, reason="ready"))
    assert session.waits_for() == "2 layers of its push to be taken by s0, s1"
    session._client.sent(transfer(push, 0))
    assert session.waits_for() == "1 layers of its push to be taken by s1"
    session._client.sent(transfer(push, 1))
    assert session.waits_for().startswith("an update with its push, which the shards have")
    session.commanded(do.StartPull(cluster="a", pull=Ticket(1, 2), version=7, counted=push, reason="new"))
    assert session.waits_for() == "2 layers of version 7, from s0, s1"
    session.disconnected("nobody answers at h:1")
    assert session.waits_for() == "a connection to the master (nobody answers at h:1)"
    session._actions.link.problem = "this is not the model that is trained here"
    assert session.waits_for() == "a connection to the master (this is not the model that is trained here)"
    session.close()


class Cluster:
    """Trains against a server, and is told after a fifth of a second."""

    def __init__(self, outer: OuterOptimizer, weight: torch.Tensor) -> None:
        self.outer, self._weight = outer, weight

    def train_until(self, holds: Callable[[], bool]) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < end_s
            self._weight.data.add_(0.01)
            self.outer.step(tokens=1)

    def be_impatient(self) -> None:
        session = self.outer._session.sessions[0]
        with session.changed:
            settings = replace(session.data.settings, lost_after_s=0.2)
            session.data = replace(session.data, settings=settings)


def test_a_loop_says_that_the_layers_of_a_shard_stand_still_and_when_they_move_again(said):
    """The thread that moves a shard's layers hangs, while its signs of life go on."""
    config = MasterConfig(shards=("s0",), settings=OuterSettings(clip_norm=None, grace_s=0.0))
    weight, texts, moves = torch.zeros(3, requires_grad=True), list[str](), threading.Event()
    with (
        LocalParameterServer(config) as server,
        OuterOptimizer({"w": weight}, master=server.address, token=server.token, cluster="a", inner_steps=2) as outer,
    ):
        cluster = Cluster(outer, weight)
        cluster.train_until(lambda: outer.metrics.outer_rounds >= 3)
        (loop,) = [one for one in threading.enumerate() if isinstance(one, LayerLoop) and one.name == "layers of s0"]
        cluster.be_impatient()
        said()
        loop.order(lambda: moves.wait(PATIENCE_S) and None)
        try:
            # On a busy machine a round may be late before.
            cluster.train_until(lambda: texts.extend(said()) or any(" layers of " in text for text in texts))
            assert [one.state for one in server.status().shards] == ["ready"], "the master hears of it as ever"
        finally:
            moves.set()
        text = next(text for text in texts if " layers of " in text)
        assert text.startswith("cluster a has had no new version for")
        assert "by itself, and waits for 1 layers of" in text
        assert "s0" in text
        texts.clear()
        cluster.train_until(lambda: any("cluster a has version" in text for text in texts) or texts.extend(said()))
