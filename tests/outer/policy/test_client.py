"""A cluster's side of the protocol, by itself: what ends a push, what a lost connection leaves of it."""

import pytest

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.events import LayerTransfer, PushOutcome, Ticket, TransferWay
from spantrain.outer.policy.client import ClientPhase, OuterClient

PUSH, PULL = Ticket(1, 1), Ticket(1, 2)


def layer(ticket: Ticket, number: int) -> LayerTransfer:
    return LayerTransfer(ticket=ticket, cluster="a", worker="w", layer=number, shard="s", size_bytes=4)


def client_in(phase: ClientPhase) -> OuterClient:
    client = OuterClient("a", {"w": (0, 1)})
    if phase is not ClientPhase.FREE:
        client.ask(tokens=1)
    if phase in (ClientPhase.SENDING, ClientPhase.SENT):
        client.on_command(0.0, do.StartPush(cluster="a", push=PUSH, parameters=False, reason="test"))
    if phase is ClientPhase.SENT:
        client.sent(layer(PUSH, 0))
        client.sent(layer(PUSH, 1))
    assert client.phase is phase
    return client


def pulled(client: OuterClient, counted: Ticket | None) -> list[do.UseVersion]:
    client.on_command(0.0, do.StartPull(cluster="a", pull=PULL, version=7, counted=counted, reason="test"))
    said = [one for number in (0, 1) for one in client.arrived(layer(PULL, number))]
    return [one for one in said if isinstance(one, do.UseVersion)]


def test_a_push_from_asking_to_the_version_with_it():
    client = client_in(ClientPhase.SENDING)
    move = do.Move(way=TransferWay.PUSH, transfer=layer(PUSH, 0), version=0, reason="test")
    (send,) = client.on_command(0.0, move)
    assert send == do.SendLayer(transfer=layer(PUSH, 0), parameters=False, reason="test")
    assert client.sent(layer(PUSH, 0)) == []
    assert client.sent(layer(PUSH, 1)) == [on.PushSent(cluster="a", push=PUSH)]
    (use,) = pulled(client, PUSH)
    assert (use.version, use.counted) == (7, True)
    assert (client.phase, client.version) == (ClientPhase.FREE, 7)


@pytest.mark.parametrize("counted", [PUSH, Ticket(1, 0)])
def test_only_of_the_push_that_waits_it_matters_that_it_was_left_out(counted):
    client = client_in(ClientPhase.SENT)
    client.on_command(
        0.0, do.StartPull(cluster="a", pull=PULL, version=7, counted=counted, left_out=True, reason="test")
    )
    client.arrived(layer(PULL, 0))
    (use,) = [one for one in client.arrived(layer(PULL, 1)) if isinstance(one, do.UseVersion)]
    assert use.counted == use.left_out == (counted == PUSH)


@pytest.mark.parametrize("counted", [None, Ticket(1, 0)])
def test_a_version_that_comes_for_another_reason_leaves_the_push_waiting(counted):
    client = client_in(ClientPhase.SENT)
    (use,) = pulled(client, counted)
    assert not use.counted
    assert client.phase is ClientPhase.SENT
    assert client.ask(tokens=5) == []


@pytest.mark.parametrize("phase", list(ClientPhase))
def test_a_lost_connection_asks_for_the_fate_of_what_was_sent_whole(phase):
    client = client_in(phase)
    *skipped, registered = client.registered(0.0, (3,))
    assert registered.unresolved == (PUSH if phase is ClientPhase.SENT else None)
    assert registered.leases == (3,)
    assert len(skipped) == (phase in (ClientPhase.ASKING, ClientPhase.SENDING))
    assert client.phase is (ClientPhase.SENT if phase is ClientPhase.SENT else ClientPhase.FREE)


@pytest.mark.parametrize(("fate", "phase"), [
    (PushOutcome.PENDING, ClientPhase.SENT), (PushOutcome.COUNTED, ClientPhase.SENT),
    (PushOutcome.SKIPPED, ClientPhase.FREE),
])  # fmt: skip
def test_what_became_of_it_decides_whether_it_is_waited_for(fate, phase):
    client = client_in(ClientPhase.SENT)
    client.registered(0.0)
    said = client.on_command(0.0, do.Welcome(cluster="a", version=3, fate=fate, reason="test"))
    assert client.phase is phase
    assert [type(one) for one in said] == ([do.SkipPush] if fate is PushOutcome.SKIPPED else [])


@pytest.mark.parametrize("phase", list(ClientPhase))
def test_what_belongs_to_something_that_has_ended_changes_nothing(phase):
    client, other = client_in(phase), Ticket(9, 9)
    for command in (
        do.SkipRound(cluster="a", push=other, reason="test"),
        do.RefusePush(cluster="a", push=other, reason="test"),
        do.Move(way=TransferWay.PUSH, transfer=layer(other, 0), version=0, reason="test"),
        do.EndPull(cluster="a", pull=other, reason="test"),
    ):
        assert client.on_command(0.0, command) == []
    assert client.sent(layer(other, 0)) == client.arrived(layer(other, 0)) == []
    assert client.phase is phase


@pytest.mark.parametrize("phase", list(ClientPhase))
def test_who_has_too_little_to_push_says_so_unless_a_push_is_under_way(phase):
    client = client_in(phase)
    assert client.keep_round() == ([on.RoundKept(cluster="a")] if phase is ClientPhase.FREE else [])
    assert client.phase is phase


@pytest.mark.parametrize("phase", list(ClientPhase))
def test_a_round_is_not_ended_by_what_a_push_has_crossed_on_its_way(phase):
    client = client_in(phase)
    assert client.is_to_end(do.EndRound(cluster="a", reason="test")) == (phase is not ClientPhase.ASKING)
    assert not client.is_to_end(do.RegisterAgain(member="a", reason="test"))


def test_a_pull_that_ended_is_asked_for_again_and_its_layers_are_not_used():
    client = client_in(ClientPhase.FREE)
    client.on_command(0.0, do.StartPull(cluster="a", pull=PULL, version=7, counted=None, reason="test"))
    client.arrived(layer(PULL, 0))
    assert client.on_command(0.0, do.EndPull(cluster="a", pull=PULL, reason="test")) == [on.PullAsked(cluster="a")]
    assert client.arrived(layer(PULL, 1)) == []
    assert client.version == 0


def test_after_a_refusal_it_asks_again_after_a_pause_and_at_once_when_a_shard_comes():
    client = OuterClient("a", {"a": (0, 1)})
    client.registered(0.0)
    client.on_command(0.0, do.Welcome(cluster="a", version=1, fate=None, reason="test"))
    for pause_s in (0.25, 0.5, 1.0):
        client.ask(tokens=1)
        client.on_command(8.0, do.RefusePush(cluster="a", push=None, reason="s0 is away"))
        assert not client.may_ask(8.0 + 0.99 * pause_s)
        assert client.may_ask(8.0 + pause_s)
    client.shards_changed()
    assert client.may_ask(8.0)
    client.disconnected()
    assert not client.may_ask(99.0)
