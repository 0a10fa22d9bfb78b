"""The master with made-up clusters and shards: whole rounds, and faults one at a time."""

import pytest

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.errors import ProtocolError
from spantrain.outer.policy.client import ClientPhase
from testing.outer.training import EVERY_SAMPLE, say, seeded_world, train_to_the_end


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("clusters", [1, 3])
def test_every_sample_is_learned_from_once(clusters, shards):
    made = seeded_world(clusters, shards)
    train_to_the_end(made)
    assert made.learned == EVERY_SAMPLE
    assert made.master.state.version == made.master.state.updates
    assert not made.master.dropped


def test_a_cluster_whose_numbers_are_not_finite_is_left_out_on_every_shard():
    made = seeded_world(3)
    made.clusters["c1"].spoiled = True
    train_to_the_end(made)
    assert made.learned == EVERY_SAMPLE - made.left_out
    assert made.left_out
    assert made.master.state.left_out == made.master.state.clusters["c1"].left_out > 0


def test_a_lost_cluster_is_dropped_after_missed_heartbeats_and_its_data_given_to_others():
    made = seeded_world(2)
    say(made, "c0", made.clusters["c0"].train())
    made.settle()
    made.kill("c0")
    assert made.master.clusters == ("c0", "c1")
    made.pass_time(11.0)
    made.settle()
    assert made.master.clusters == ("c1",)
    train_to_the_end(made)
    assert made.learned == EVERY_SAMPLE


def test_a_shard_with_versions_that_the_master_never_made_is_told_to_end():
    """Those of an earlier run would be taken for this one's after a restart, and not be written over."""
    made = seeded_world(1, 2)
    commands = made.master.on_event(made.now_s, on.ShardRegistered(shard="s1", versions=(1, 7)))
    (told,) = [one for one in commands if isinstance(one, do.StartAnew)]
    assert told.shard == "s1"
    assert "s1 holds version 7, and this master has made 1 at most: give s1 an empty folder" in told.reason
    assert not any(isinstance(one, do.Restore) for one in commands)


@pytest.mark.parametrize("told", [do.Restore, do.Commit])
def test_a_shard_that_lives_but_does_not_answer_is_told_to_register_again(told):
    made = seeded_world(1, 2, transfer_limit_s=60.0, lost_after_s=10.0)
    if told is do.Restore:
        made.connect("s1")
        made.deliver("up s1")
    else:
        say(made, "c0", made.clusters["c0"].train())
        made.settle()
        say(made, "c0", made.clusters["c0"].train())
        say(made, "c0", made.clusters["c0"].ask())
        while not any(isinstance(one, told) for one in made.lines["s1"]):
            made.deliver(made.busy_lines[0])
    (command,) = [one for one in made.lines["s1"] if isinstance(one, told)]
    made.lines["s1"].clear()
    made.settle()
    assert not made.lines["s1"]
    made.pass_time(70.0)
    assert {type(one) for one in made.lines["s1"]} == {do.RegisterAgain}, command
    made.settle()
    assert made.master.shards.all_ready
    train_to_the_end(made)
    assert made.learned == EVERY_SAMPLE


def test_a_shard_that_lost_its_memory_takes_all_back_to_what_all_still_have():
    made = seeded_world(1, 2)
    for name in made.shards:
        made.snapshot(name)
    made.settle()
    first = made.master.state.version
    say(made, "c0", made.clusters["c0"].train())
    made.settle()
    made.clusters["c0"].train()
    say(made, "c0", made.clusters["c0"].ask())
    made.settle()
    made.pass_time(2.0)
    made.settle()
    assert made.master.state.version == first + 1
    assert made.learned
    made.kill("s1")
    made.pass_time(11.0)
    made.revive("s1")
    made.settle()
    assert made.master.state.version == first + 2, "a new number for the old content"
    assert not made.learned
    made.check()


def test_while_a_shard_is_away_pushes_are_refused_and_training_goes_on():
    made = seeded_world(1, 2)
    for name in made.shards:
        made.snapshot(name)
    say(made, "c0", made.clusters["c0"].train())
    made.settle()
    made.kill("s0")
    made.pass_time(11.0)
    made.clusters["c0"].train()
    (refused,) = [
        command for command in made.master.on_event(made.now_s, made.clusters["c0"].ask()[0])
        if isinstance(command, do.RefusePush)
    ]  # fmt: skip
    assert refused.push is None
    assert "s0" in refused.reason
    made.clusters["c0"].on_command(refused)
    assert made.clusters["c0"].client.phase is ClientPhase.FREE
    made.revive("s0")
    made.settle()
    train_to_the_end(made)
    assert made.learned == EVERY_SAMPLE


@pytest.mark.parametrize("connected", [True, False])
def test_when_all_is_lost_before_a_counted_push_is_pulled_its_cluster_brings_parameters(connected):
    made = seeded_world(1, 2)
    for _ in range(2):
        say(made, "c0", made.clusters["c0"].train())
        made.settle()
    say(made, "c0", made.clusters["c0"].ask())
    while not any(isinstance(one, do.Commit) for one in made.lines["s1"]):
        made.deliver(made.busy_lines[0])
    for name in ("s0", "s1"):
        made.kill(name)
        made.revive(name)
    if not connected:
        made.connect("c0")
    made.settle()
    assert not made.master.state.seeded
    assert made.clusters["c0"].client.phase is ClientPhase.FREE
    say(made, "c0", made.clusters["c0"].ask())
    made.settle()
    assert made.master.state.seeded
    train_to_the_end(made)
    assert made.learned == EVERY_SAMPLE
    assert made.master.state.clusters["c0"].tokens == len(EVERY_SAMPLE), "what was pushed twice counts once"


def test_an_update_in_the_middle_of_a_pull_mixes_nothing():
    """One layer of the old version has come, then there is a new one; the rest still comes of the old one."""
    made = seeded_world(2, grace_s=0.0)
    for name in made.clusters:
        say(made, name, made.clusters[name].train())
        made.settle()
        made.clusters[name].train()
    made.tell(on.PullAsked(cluster="c1"))
    for line in ("s0", "c1"):
        made.deliver(line)
    while "c1" in made.busy_lines and len(made.clusters["c1"].pulled) < 1:
        made.deliver("c1")
    before = made.clusters["c1"].client.pull.version
    held_back = [made.lines[line] for line in ("c1", "up c1")]
    made.lines["c1"], made.lines["up c1"] = type(held_back[0])(), type(held_back[0])()
    say(made, "c0", made.clusters["c0"].ask())
    made.settle()
    assert made.master.state.version == before + 1
    assert all(before in shard.versions for shard in made.shards.values())
    made.lines["c1"], made.lines["up c1"] = held_back
    made.settle()
    assert made.clusters["c1"].base == before
    train_to_the_end(made)
    assert made.learned == EVERY_SAMPLE


def test_what_cannot_be_is_refused_and_changes_nothing():
    made = seeded_world(1, 2)
    before = made.master.state
    with pytest.raises(ProtocolError, match="each of 5 layers once"):
        made.master.on_event(0.0, on.ClusterRegistered(cluster="c9", workers={"w": (0, 1, 1)}))
    with pytest.raises(ProtocolError, match="no shard of this model; its shards are s0, s1"):
        made.master.on_event(0.0, on.ShardBeat(shard="x", versions=()))
    assert made.master.state == before
    assert made.master.clusters == ("c0",)


def test_a_push_from_an_older_version_than_the_clusters_last_is_refused_and_brings_a_pull():
    made = seeded_world(1, 1)
    say(made, "c0", [*made.clusters["c0"].train()])
    made.settle()
    made.clusters["c0"].train()
    say(made, "c0", made.clusters["c0"].ask())
    made.settle()
    made.pass_time(2.0)
    made.settle()
    asked = on.PushAsked(cluster="c0", base_version=made.clusters["c0"].base - 1, tokens=1)
    commands = made.master.on_event(made.now_s, asked)
    assert [type(command) for command in commands][:2] == [do.RefusePush, do.StartPull]
