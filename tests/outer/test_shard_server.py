"""Whole rounds through real sockets: pushes, updates, pulls; restarts, foreign models, what is left behind."""

import threading

import pytest
import torch

from spantrain.core.outer import commands as do
from spantrain.core.outer.events import LayerTransfer, Restored, Ticket, TransferLost, TransferWay
from spantrain.outer.rules.nesterov import Nesterov
from spantrain.outer.shard.snapshots import FolderSnapshots, ShardVersion, SnapshotWriter, to_keep
from spantrain_studies.outer.plain import MemorySnapshots
from testing.outer.rounds import MadeUpRounds, random_tensors
from testing.outer.shards import LocalOuterRun
from testing.patience import PATIENCE_S, no_threads_left


def same(got, wanted):
    return got.keys() == wanted.keys() and all(torch.equal(got[name], one) for name, one in wanted.items())


def pushes(k):
    return {name: random_tensors(100 * k + ord(name), scale=0.1) for name in "ab"}


def reference(rounds):
    """The same without sockets."""
    made = MadeUpRounds(random_tensors(0), "ab", shards=2)
    for k in rounds:
        for name, one in pushes(k).items():
            made.push(name, one, tokens=10)
    return made.parameters


@pytest.mark.parametrize("encrypted", [True, False], ids=["curve", "plain"])
def test_rounds_through_sockets_are_those_without_bit_for_bit(tmp_path, encrypted):
    with LocalOuterRun(random_tensors(0), shards=2, clusters="ab", folder=tmp_path, encrypted=encrypted) as local:
        local.seed(random_tensors(0))
        for k in range(3):
            local.round(pushes(k))
        for cluster in local.clusters.values():
            assert cluster.used == [1, 2, 3, 4]
            assert same(cluster.came, reference(range(3)))
            assert not cluster.skipped
            assert not cluster.lost_layers
        assert [shard.versions for shard in local.shards.values()] == [(4,), (4,)]


def test_all_begin_again_from_snapshots(tmp_path):
    """Shards, then the master, too."""
    with LocalOuterRun(random_tensors(0), shards=2, clusters="ab", folder=tmp_path) as local:
        local.seed(random_tensors(0))
        local.round(pushes(0))
        for name in ("s0", "s1"):
            local.shards[name].close()
            local.start_shard(name)
            local.until(lambda name=name: local.shards[name].versions == (2,))
        local.round(pushes(1))
        for shard in local.shards.values():
            shard.close()
        for name in local.layout.shards:
            local.start_shard(name)
        local.start_master()
        local.until(lambda: all(cluster.used[-2:] == [3, 3] for cluster in local.clusters.values()))
        local.round(pushes(2))
        for cluster in local.clusters.values():
            assert same(cluster.came, reference(range(3)))


def test_a_shard_that_lost_all_takes_the_others_back_to_what_all_have(tmp_path):
    """Nobody saved anything but version 1: a new number for its content, and rounds go on from there."""
    stores = {name: MemorySnapshots() for name in ("s0", "s1")}
    with LocalOuterRun(random_tensors(0), shards=2, clusters="ab", folder=tmp_path) as local:
        local.seed(random_tensors(0))
        for name, shard in local.shards.items():
            stores[name].save(shard._memory(0).serving)
        local.round(pushes(0))
        for name in local.layout.shards:
            local.shards[name].close()
            local.start_shard(name, stores[name])
        local.start_master()
        local.until(lambda: all(cluster.used[-1] == 3 for cluster in local.clusters.values()))
        for cluster in local.clusters.values():
            assert same(cluster.came, random_tensors(0))


def test_shards_step_by_the_rule_of_a_master_that_was_started_again(tmp_path):
    with LocalOuterRun(random_tensors(0), shards=2, clusters="ab", folder=tmp_path) as local:
        local.seed(random_tensors(0))
        local.round(pushes(0))
        local.rule = Nesterov(learning_rate=1e-30, momentum=0.0)
        local.start_master()
        local.until(lambda: all(cluster.used[-2:] == [2, 2] for cluster in local.clusters.values()))
        local.round(pushes(1))
        for cluster in local.clusters.values():
            assert same(cluster.came, reference(range(1)))


def test_layers_of_a_connection_that_ended_are_dropped_and_the_round_is_skipped(tmp_path):
    with LocalOuterRun(random_tensors(0), shards=2, clusters="ab", folder=tmp_path) as local:
        local.seed(random_tensors(0))
        cluster = local.clusters["a"]
        cluster.ask(pushes(0)["a"], 10)
        local.until(lambda: cluster.client.phase.value == "sent")
        local.links["s1"].register_again("test")
        local.until(lambda: cluster.skipped)
        assert local.shards["s1"]._memory(0)._pushes == {}
        local.until(lambda: any(isinstance(event, Restored) for event in local.heard))
        local.round(pushes(1))
        assert [shard.versions for shard in local.shards.values()] == [(2,), (2,)]


def test_a_snapshot_of_another_model_is_named_and_ends_the_shard(tmp_path):
    other = {name: torch.zeros(7) for name in random_tensors(0)}
    with LocalOuterRun(random_tensors(0), shards=2, clusters="ab", folder=tmp_path) as local:
        local.seed(random_tensors(0))
        FolderSnapshots(tmp_path / "s1").save(ShardVersion(version=2, parameters=other, state={"velocity": other}))
        restore = do.Restore(shard="s1", source=2, version=2, reason="test")
        local.links["s1"].listener.commanded(restore)
        local.until(lambda: local.shards["s1"].failure)
        assert "s1: snapshot of version 2" in local.shards["s1"].failure
        assert "give it a folder of its own" in local.shards["s1"].failure


def test_what_it_cannot_give_is_told_and_what_it_lacks_makes_it_register_again(tmp_path):
    with LocalOuterRun(random_tensors(0), shards=1, clusters="a", folder=tmp_path) as local:
        local.seed(random_tensors(0))
        link = local.links["s0"]
        told, again = [], []
        link.tell, link.register_again = (lambda *events: told.extend(events)), again.append
        listener = link.listener
        missing = Ticket(1, 77)
        transfer = LayerTransfer(ticket=Ticket(1, 76), cluster="a", worker="a", layer=0, shard="s0", size_bytes=64)
        listener.commanded(do.Move(way=TransferWay.PULL, transfer=transfer, version=9, reason="test"))
        listener.commanded(do.Measure(shard="s0", update=Ticket(1, 78), pushes=(missing,), reason="test"))
        done = threading.Event()
        local.shards["s0"]._snapshots.load = lambda version: done.set()
        listener.commanded(do.Restore(shard="s0", source=9, version=9, reason="test"))
        assert done.wait(PATIENCE_S)
        local.shards["s0"].close()
        (lost,) = [event for event in told if isinstance(event, TransferLost)]
        assert (lost.transfer, lost.way) == (transfer, TransferWay.PULL)
        assert "layer 0 of version 9; it holds" in lost.reason
        assert again[0].startswith("s0: push 1.77 is not held whole")
        assert again[1] == "it does not have what it was told to restore"


def test_the_master_is_told_of_a_layer_whose_connection_has_ended(tmp_path):
    with LocalOuterRun(random_tensors(0), shards=1, clusters="a", folder=tmp_path) as local:
        local.seed(random_tensors(0))
        told, link = [], local.links["s0"]
        link.tell = lambda *events: told.extend(one for one in events if isinstance(one, TransferLost))
        transfer = LayerTransfer(ticket=Ticket(1, 76), cluster="a", worker="a", layer=0, shard="s0", size_bytes=64)
        link.listener.commanded(do.Move(way=TransferWay.PUSH, transfer=transfer, version=1, reason="test"))
        local.clusters["a"].wire.close()
        local.until(lambda: told)
        assert told == [TransferLost(way=TransferWay.PUSH, transfer=transfer, reason="its connection has ended")]


def test_closing_leaves_no_threads(tmp_path):
    with no_threads_left(), LocalOuterRun(random_tensors(0), shards=2, clusters="ab", folder=tmp_path) as local:
        local.seed(random_tensors(0))
    assert sorted(path.name[:9] for path in (tmp_path / "s0").iterdir()) == ["version-1"]


class SlowStore(MemorySnapshots):
    """Writes when it is let."""

    def __init__(self):
        super().__init__(keep=100)
        self.began, self.let = threading.Semaphore(0), threading.Semaphore(0)

    def save(self, version):
        self.began.release()
        assert self.let.acquire(timeout=PATIENCE_S)
        super().save(version)


def wait_idle(writer):
    with writer._changed:
        assert writer._changed.wait_for(lambda: writer._writing is None, PATIENCE_S)


def version(number):
    return ShardVersion(version=number, parameters={}, state={"velocity": {}})


@pytest.mark.parametrize("lasts", [0, 1, 2, 3, 5])
def test_a_slow_writer_still_writes_what_all_others_write(lasts):
    """Each write lasts so many rounds: from some point on, multiples of a power of two, and none of them is missed."""
    store, saved = SlowStore(), []
    writer = SnapshotWriter(store, name="s0", saved=saved.append, died=saved.append)
    left = None
    for number in range(1, 65):
        if left == 0:
            store.let.release()
            wait_idle(writer)
            left = None
        if writer.offer(version(number)):
            assert left is None
            assert store.began.acquire(timeout=PATIENCE_S)
            left = lasts
        elif left is not None:
            left -= 1
        if left == 0 and lasts == 0:
            store.let.release()
            wait_idle(writer)
            left = None
    store.let.release()
    store.let.release()
    writer.close(version(65))
    every = 2 ** lasts.bit_length()
    assert set(range(2 * every, 65, every)) <= set(store.versions)
    assert store.versions[-1] == 65, "what is served at the end is written, too"
    assert saved == list(store.versions)


def test_shards_that_write_unequally_often_keep_versions_in_common():
    for every in (1, 2, 4, 8):
        mine, others = (to_keep(range(0, 1000, step), 4) for step in (1, every))
        assert set(mine) & set(others)
