"""A real master on a real connection: rounds, restarts, and what it leaves behind."""

import os
import time

import pytest

from master_process import MortalMaster
from spantrain.core.outer import events as on
from spantrain.outer.link.link import ask_status
from spantrain.outer.master.files import token_file
from testing.outer.links import LAYERS, Hall, LinkedCluster, LinkedShard, cluster_facts, shard_facts
from testing.outer.masters import MasterRun, seeded, train, train_a_little
from testing.outer.members import Content
from testing.patience import PATIENCE_S


def test_rounds_over_real_connections(run: MasterRun) -> None:
    run.start_master()
    a, b = seeded(run, "a", "b")
    for _ in range(2):
        train_a_little(run, a)
        train_a_little(run, b)
    status = ask_status(run.master.address, run.master.token, timeout_s=PATIENCE_S)
    assert status.version == status.updates >= 5
    assert [(one.name, one.pushes >= 2, one.left_out) for one in status.clusters] == [("a", True, 0), ("b", True, 0)]
    assert {one.state for one in status.shards} == {"ready"}
    assert {(one.cluster, one.shard, one.way) for one in status.links} == {
        (cluster, shard, way) for cluster in "ab" for shard in ("s0", "s1") for way in ("push", "pull")
    }
    assert status.chunks is not None
    assert status.chunks.counted_samples == len(run.hall.shards["s0"].memory.versions[status.version])
    assert not status.refusals
    run.until(lambda: run.master.status().shards[0].heard_ago_s is not None, "the observer left nothing")


def test_shards_that_come_before_any_cluster_are_told_the_layout(run: MasterRun) -> None:
    run.start_master()
    shard = run.shard("s0")
    run.until(lambda: bool(shard.welcomes), "the shard is let in")
    assert shard.welcomes[0].layout is None
    assert (shard.welcomes[0].samples, shard.welcomes[0].chunks) == (1200, 400)
    cluster = run.cluster("a")
    run.until(lambda: shard.memory is not None, "the shard knows its layers")
    run.until(lambda: [one.name for one in shard.peers] == ["a"], "the shard knows who may dial")
    run.until(
        lambda: [one.endpoint for one in cluster.peers] == ["tcp://127.0.0.1:1"], "the cluster knows whom to dial"
    )
    run.until(
        lambda: states(run) == ["restoring", "away"], "the shard has told that it holds nothing, the other is away"
    )


def states(run: MasterRun) -> list[str]:
    return [one.state for one in run.master.status().shards]


def test_a_master_that_starts_again_goes_on_with_everybody(run: MasterRun) -> None:
    run.start_master()
    a, b = seeded(run, "a", "b")
    train_a_little(run, a)
    before, token = run.master.status(), run.master.token
    run.master.close()
    run.start_master()
    assert run.master.token == token == token_file(run.folder / "state").read_text().strip()
    after = run.master.status()
    assert after.epoch in (before.epoch, before.epoch + 1)
    assert (after.version, after.updates) == (before.version, before.updates)
    assert {one.name: one.tokens for one in after.clusters}["a"] == before.clusters[0].tokens > 0
    train_a_little(run, b)
    train_a_little(run, a)
    assert all(one.losses for one in (a, b))
    assert run.master.status().epoch == before.epoch + 1


def test_a_shard_that_was_started_again_is_dialled_at_its_new_place(run: MasterRun) -> None:
    run.start_master()
    (a,) = seeded(run, "a")
    before = run.hall.shards["s1"]
    before.link.close()
    run.until(lambda: states(run)[1] == "away", "its leaving is seen")
    run.shard("s1", before)
    train_a_little(run, a)
    assert len(a.peers) == 2


@pytest.mark.parametrize("name", ["s0", "a"], ids=["of a shard", "of a cluster, and of another model"])
def test_who_is_refused_under_a_name_in_use_pushes_nobody_out(run: MasterRun, name: str) -> None:
    run.start_master()
    (a,) = seeded(run, "a")
    lost = [[*one.losses] for one in (*run.hall.shards.values(), a)]
    other = LinkedCluster(Hall(), name)
    other.connect(run.master.address, run.master.token, cluster_facts(LAYERS[:3]))
    run.stack.callback(other.link.close)
    run.until(lambda: "take another name" in str(other.link.problem), "it is told why")
    train_a_little(run, a)
    assert [one.losses for one in (*run.hall.shards.values(), a)] == lost
    assert not other.welcomes


def test_a_link_that_is_closed_at_once_leaves_nothing(run: MasterRun) -> None:
    run.start_master()
    for _ in range(3):
        shard = run.shard("s0")
        shard.link.tell(on.ShardLost(shard="s0", reason="never told"))
        shard.link.close()
    run.master.close()
    alone = LinkedShard(run.hall, "s1")
    alone.connect(run.master.address, run.master.token, shard_facts())
    alone.link.close()
    assert not alone.welcomes


@pytest.mark.slow
def test_a_master_that_is_killed_loses_nothing_that_it_decided(run: MasterRun) -> None:
    """Its process is killed at moments that nobody chose; those that live on go on with the next."""
    address, hall = f"unix:{run.folder}/master", run.hall
    master = run.stack.enter_context(MortalMaster(address, run.folder / "state"))
    token = master.start()
    shards = [LinkedShard(hall, name) for name in ("s0", "s1")]
    clusters = [LinkedCluster(hall, name) for name in ("a", "b")]
    for one in (*shards, *clusters):
        one.connect(address, token, cluster_facts() if isinstance(one, LinkedCluster) else shard_facts())
        run.stack.callback(one.link.close)
    version = 0
    for turn in range(3):
        version = trained_to(version + 2, clusters)
        master.kill()
        if turn < 2:
            assert master.start() == token
    contents: dict[int, Content] = {}
    for shard in shards:
        assert shard.memory
        for number, content in shard.memory.versions.items():
            assert contents.setdefault(number, content) == content
    os.unlink(f"{run.folder}/master")
    os.unlink(f"{run.folder}/master.control")


def trained_to(version: int, clusters: list[LinkedCluster]) -> int:
    """Let clusters train until one has that version, or a newer one; return it."""
    end_s = time.monotonic() + PATIENCE_S
    while (newest := max(one.cluster.base for one in clusters)) < version:
        assert time.monotonic() < end_s, (version, [one.link.problem for one in clusters])
        for one in clusters:
            train(one)
        time.sleep(0.01)
    return newest
