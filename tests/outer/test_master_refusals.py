"""A real master on a real connection: strangers, members that speak for others, and what makes no sense."""

import os
from dataclasses import replace
from typing import Any

import pytest

from spantrain.core.outer import events as on
from spantrain.core.outer.events import LayerTransfer, Ticket, TransferWay
from spantrain.errors import ProtocolError, UsageError
from spantrain.outer.link.codec import encode_message, encode_value
from spantrain.outer.link.link import ask_status
from spantrain.outer.master.server import MasterServer
from spantrain.transport.control.protocol import RemoteRefusal
from testing.outer.links import LAYERS, WHOLE, LinkedCluster, LinkedShard, cluster_facts, shard_facts
from testing.outer.masters import CONFIG, MasterRun, seeded, train_a_little
from testing.outer.policy import layers_of
from testing.patience import PATIENCE_S


def test_a_name_is_taken_over_by_who_joins_with_it_last(run: MasterRun) -> None:
    run.start_master()
    first = run.client("a")
    number = first.call("enter", {"facts": encode_value(cluster_facts())}, timeout_s=PATIENCE_S)["connection"]
    with pytest.raises(RemoteRefusal, match="of another kind, model or encryption"):
        run.client("a", cluster_facts(LAYERS[:3]).brief)
    first.call("tell", {"connection": number, "batch": 1, "events": []}, timeout_s=PATIENCE_S)
    second = run.client("a", cluster_facts().brief)
    with pytest.raises(RemoteRefusal, match="not a member of this run any more"):
        first.call("tell", {"connection": number, "batch": 2, "events": []}, timeout_s=PATIENCE_S)
    with pytest.raises(RemoteRefusal, match=f"connection {number + 1} of a has ended"):
        second.call("tell", {"connection": number + 1, "batch": 1, "events": []}, timeout_s=PATIENCE_S)
    entered = second.call("enter", {"facts": encode_value(cluster_facts())}, timeout_s=PATIENCE_S)
    assert entered["connection"] == number + 1


def test_of_two_that_run_by_one_name_the_second_is_refused_with_who_is_the_first(run: MasterRun) -> None:
    """Both pushed each other out, for as long as both ran."""
    run.start_master()
    (first,) = seeded(run, "a")
    second = LinkedCluster(run.hall, "a")
    second.connect(run.master.address, run.master.token, cluster_facts())
    run.stack.callback(second.link.close)
    run.until(lambda: second.link.refused is not None, "it is refused for good")
    assert f"cluster a is there already, process {os.getpid()} on " in str(second.link.refused)
    assert "take another name, or end it" in str(second.link.refused)
    assert not second.welcomes
    assert first.link.problem is None
    run.hall.clusters["a"] = first
    train_a_little(run, first)
    assert first.losses == []


def test_a_wrong_token_is_refused_and_said(run: MasterRun, tmp_path_factory: pytest.TempPathFactory) -> None:
    master = run.start_master()
    with MasterServer(
        bind=f"unix:{run.folder}/master-2", state_dir=tmp_path_factory.mktemp("other"), config=CONFIG
    ) as other:
        shard = LinkedShard(run.hall, "s0")
        shard.connect(master.address, other.token, shard_facts())
        run.stack.callback(shard.link.close)
        run.until(lambda: "not the master that made this token" in str(shard.link.refused), "it is refused for good")
        with pytest.raises(UsageError, match="not the master"):
            ask_status(master.address, other.token, timeout_s=PATIENCE_S)
    assert not shard.welcomes
    assert master.status().shards[0].state == "away"


def events_of_others() -> list[Any]:
    one = LayerTransfer(ticket=Ticket(1, 1), cluster="a", worker="a", layer=0, shard="s0", size_bytes=4)
    return [
        on.PushAsked(cluster="a", base_version=0, tokens=9),
        on.ClusterRegistered(cluster="a", workers={"a": WHOLE}),
        on.ClusterRegistered(cluster="z", workers={"a": WHOLE}),
        on.ClusterLeft(cluster="a"),
        on.ShardLost(shard="s0", reason="I say so"),
        on.Committed(shard="s0", version=9, versions=(9,)),
        on.Moved(way=TransferWay.PUSH, transfer=one),
        on.Moved(way=TransferWay.PULL, transfer=one),
        on.TransferLost(way=TransferWay.PULL, transfer=one, reason="I say so"),
        on.Ticked(),
    ]


def test_nobody_speaks_for_another(run: MasterRun) -> None:
    run.start_master()
    (a,) = seeded(run, "a")
    stranger = run.client("z")
    number = stranger.call("enter", {"facts": encode_value(cluster_facts())}, timeout_s=PATIENCE_S)["connection"]
    told = events_of_others()
    answer = stranger.call(
        "tell", {"connection": number, "batch": 1, "events": [encode_message(event) for event in told]},
        timeout_s=PATIENCE_S,
    )  # fmt: skip
    assert len(answer["refused"]) == len(told)
    assert answer["refused"][0] == "z, a cluster, cannot say PushAsked: only a can"
    assert "the workers of z are named z or z/..., not a" in answer["refused"][2]
    assert run.master.status().refusals == {"foreign": len(told)}
    train_a_little(run, a)


def test_what_makes_no_sense_is_refused_and_counted(run: MasterRun) -> None:
    run.start_master()
    client = run.client("a")
    number = client.call("enter", {"facts": encode_value(cluster_facts())}, timeout_s=PATIENCE_S)["connection"]
    head = {"connection": number, "batch": 1}
    beat = encode_message(on.ClusterBeat(cluster="a"))
    for payload, message in [
        ({**head, "events": [{"kind": "Unpickle"}]}, "unknown event 'Unpickle'"),
        ({**head, "events": {}}, "a batch must be a list of at most 1000 events"),
        ({**head, "events": [beat] * 1001}, "a batch must be a list of at most 1000 events"),
        ({**head, "batch": -1, "events": []}, "batch must be a number from 0 on"),
        ({**head, "batch": 3, "events": []}, "batch 3 came after 0"),
    ]:
        with pytest.raises(RemoteRefusal, match=message):
            client.call("tell", payload, timeout_s=PATIENCE_S)
    with pytest.raises(RemoteRefusal, match=r"facts.kind|must be one of shard"):
        client.call("enter", {"facts": {**encode_value(shard_facts()), "kind": "god"}}, timeout_s=PATIENCE_S)
    with pytest.raises(RemoteRefusal, match="there is no notice 7"):
        client.call("listen", {"connection": number, "after": 7}, timeout_s=PATIENCE_S)
    with pytest.raises(ProtocolError, match="send less"):
        client.call("tell", {**head, "events": [beat | {"x": "y" * 2**23}]}, timeout_s=PATIENCE_S)
    assert run.master.status().refusals == {"malformed": 5, "out_of_order": 1}
    assert client.call("tell", {**head, "events": []}, timeout_s=PATIENCE_S) == {"refused": []}


def test_who_joined_and_never_entered_gives_way_to_others(run: MasterRun) -> None:
    run.start_master()
    entered = run.client("a")
    entered.call("enter", {"facts": encode_value(cluster_facts())}, timeout_s=PATIENCE_S)
    for number in range(2 * CONFIG.max_members):
        run.client(f"idle-{number}")
    assert len(run.master.status().clusters) == 1
    with pytest.raises(RemoteRefusal, match="no notice 7"):
        entered.call("listen", {"connection": 1, "after": 7}, timeout_s=PATIENCE_S)


@pytest.mark.parametrize(
    ("name", "facts", "message"),
    [
        ("s7", shard_facts(), "s7 is none of the shards s0, s1"),
        ("s0", replace(shard_facts(), endpoint=""), "shard s0 must listen"),
        ("s1", cluster_facts(), "s1 is a shard's name"),
        ("a/w1", cluster_facts(), "a cluster's name has no slash"),
        ("b", cluster_facts(layers_of(1)), "the model cannot be divided: each shard needs a layer"),
        ("b", replace(cluster_facts(), public_key="x" * 40), "b encrypts its data, this run does not"),
    ],
)
def test_who_cannot_be_let_in(run: MasterRun, name: str, facts: Any, message: str) -> None:
    run.start_master()
    with pytest.raises(RemoteRefusal, match=message):
        run.client(name).call("enter", {"facts": encode_value(facts)}, timeout_s=PATIENCE_S)
    assert run.master.status().refusals == {"not_let_in": 1}


def test_another_model_is_refused_with_its_differences(run: MasterRun) -> None:
    run.start_master()
    run.client("a").call("enter", {"facts": encode_value(cluster_facts())}, timeout_s=PATIENCE_S)
    for layers, message in [
        (LAYERS[:-1], "it lacks 4.weight"),
        ((*LAYERS, *layers_of(1, 1, 1, 1, 1, 1)[5:]), "it has besides 5.weight"),
        (layers_of(1, 2, 9, 4, 5), r"unlike are 2.weight \(\[9\] float32, wanted \[3\] float32\)"),
        ((LAYERS[1], LAYERS[0], *LAYERS[2:]), "the same parameters are in other layers, from layer 0 on"),
    ]:
        with pytest.raises(RemoteRefusal, match=message):
            run.client("b").call("enter", {"facts": encode_value(cluster_facts(layers))}, timeout_s=PATIENCE_S)
