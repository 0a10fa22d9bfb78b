"""What a shard refuses, and what outlives it."""

import errno

import pytest
import torch

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.events import Ticket
from spantrain.errors import ProtocolError
from spantrain.outer.shard import snapshots
from spantrain.outer.shard.shard import OuterShard
from spantrain.outer.shard.snapshots import FolderSnapshots, ShardVersion
from spantrain_studies.outer.plain import MemorySnapshots
from testing.outer.rounds import MadeUpRounds, random_tensors

PUSH = Ticket(1, 99)


@pytest.fixture
def rounds() -> MadeUpRounds:
    return MadeUpRounds(random_tensors(0), "a", shards=2)


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({"0.bias": torch.zeros(4)}, r"0\.weight: got none, wanted float32 of shape \(4, 3\)"),
        ({"0.weight": torch.zeros(4, 3), "0.bias": torch.zeros(5)}, r"0\.bias: got float32 of shape \(5,\), wanted"),
        ({"0.weight": torch.zeros(4, 3), "0.bias": torch.zeros(4).half()}, r"0\.bias: got float16 of shape"),
        ({"0.weight": torch.zeros(4, 3), "0.bias": torch.zeros(4), "x": torch.zeros(1)}, r"x: got .* wanted none"),
    ],
    ids=["name", "shape", "type", "one too many"],
)
def test_a_push_of_another_model_is_refused_by_name_and_nothing_is_kept(rounds, tensors, told):
    shard = rounds.shards["s0"]
    with pytest.raises(ProtocolError, match=told):
        shard.take(PUSH, 0, tensors)
    answer = shard.on_command(do.CheckPush(shard="s0", push=PUSH, reason="test"))
    assert answer == on.PushChecked(shard="s0", push=PUSH, complete=False)


def test_a_layer_of_another_shard_is_sent_on(rounds):
    with pytest.raises(ProtocolError, match="layer 3 is not held here; send it to s1"):
        rounds.shards["s0"].take(PUSH, 3, {})


def test_layers_of_a_push_that_has_ended_are_dropped(rounds):
    shard = rounds.shards["s0"]
    shard.on_command(do.Forget(shard="s0", ticket=PUSH, reason="test"))
    with pytest.raises(ProtocolError, match=r"push 1\.99 has ended"):
        shard.take(PUSH, 0, random_tensors(0))


def test_what_is_not_there_is_not_given(rounds):
    with pytest.raises(ProtocolError, match=r"layer 0 of version 7; it holds layers 0.* of versions 1"):
        rounds.shards["s0"].give(7, 0)


def test_a_version_that_is_being_pulled_stays_until_it_need_not(rounds):
    shard = rounds.shards["s0"]
    for version, keep in ((2, (1,)), (3, ())):
        update = Ticket(1, 100 + version)
        shard.take(update, 0, {name: one for name, one in random_tensors(version).items() if name.startswith("0")})
        for layer in shard.layers:
            names = [one.name for one in rounds.layout.layers[layer].parameters]
            shard.take(update, layer, {name: random_tensors(version)[name] for name in names})
        shard.on_command(
            do.StageVersion(shard="s0", update=update, version=version, scale=1.0, parameters=update, reason="test")
        )
        shard.on_command(do.Commit(shard="s0", version=version, update=update, keep=keep, reason="test"))
        assert shard.restorable == (*keep, version)
    assert torch.equal(shard.give(3, 0)["0.bias"], random_tensors(3)["0.bias"])


def test_a_shard_that_was_started_again_goes_on_from_its_snapshot_bit_for_bit(tmp_path):
    stores = {f"s{k}": FolderSnapshots(tmp_path / f"s{k}") for k in range(2)}
    made, whole = (MadeUpRounds(random_tensors(0), "a", shards=2, snapshots=kept) for kept in (stores, None))
    for k in range(3):
        for one in (made, whole):
            one.push("a", random_tensors(k + 1, scale=0.1), tokens=10)
        for name, shard in made.shards.items():
            stores[name].save(shard.serving)
    made.shards["s1"] = OuterShard("s1", made.layout, snapshots=FolderSnapshots(tmp_path / "s1"))
    made.tell(made.shards["s1"].registered())
    for one in (made, whole):
        one.push("a", random_tensors(9, scale=0.1), tokens=10)
    assert made.master.state.version == whole.master.state.version == 5
    for name, one in whole.parameters.items():
        assert torch.equal(made.parameters[name], one)


def test_a_shard_without_the_newest_takes_the_others_back_with_it(tmp_path):
    stores = {f"s{k}": MemorySnapshots() for k in range(2)}
    made = MadeUpRounds(random_tensors(0), "a", shards=2, snapshots=stores)
    for name, shard in made.shards.items():
        stores[name].save(shard.serving)
    made.push("a", random_tensors(1, scale=0.1), tokens=10)
    made.shards["s1"] = OuterShard("s1", made.layout, snapshots=stores["s1"])
    made.tell(made.shards["s1"].registered())
    assert made.master.state.version == 3, "a new number for what version 1 held"
    for name, one in random_tensors(0).items():
        assert torch.equal(made.parameters[name], one)


def version_of(number: int) -> ShardVersion:
    tensors = random_tensors(number)
    return ShardVersion(version=number, parameters=tensors, state={"velocity": random_tensors(number + 1)})


def test_a_folder_keeps_the_newest_whole(tmp_path):
    store = FolderSnapshots(tmp_path, keep=2)
    for number in (1, 2, 10):
        store.save(version_of(number))
    (tmp_path / ".unfinished-11").write_bytes(b"half")
    again = FolderSnapshots(tmp_path, keep=2)
    assert again.versions == (2, 10)
    assert not list(tmp_path.glob(".*"))
    found = again.load(10)
    assert found
    for name, one in version_of(10).parameters.items():
        assert torch.equal(found.parameters[name], one)
    assert found.state["velocity"].keys() == version_of(10).state["velocity"].keys()
    assert again.load(1) is None


def test_on_a_full_disk_the_oldest_gives_way_to_the_newest_and_one_is_always_left(tmp_path, monkeypatch):
    store, room = FolderSnapshots(tmp_path, keep=4), 2
    real = snapshots._write

    def write(path, tensors):
        if len(store.versions) >= room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, tensors)

    monkeypatch.setattr(snapshots, "_write", write)
    for number in range(1, 6):
        store.save(version_of(number))
    assert store.versions == (4, 5)
    room = 1
    with pytest.raises(OSError, match="No space left"):
        store.save(version_of(6))
    assert store.versions == (5,)
    assert store.load(5)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "spoil", [lambda data: data[:-1], lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda _: b""]
)
def test_a_damaged_snapshot_is_set_aside_and_said(tmp_path, caplog, spoil):
    store = FolderSnapshots(tmp_path)
    for number in (1, 2):
        store.save(version_of(number))
    (path,) = tmp_path.glob("version-2-*")
    path.write_bytes(spoil(path.read_bytes()))
    assert store.load(2) is None
    assert "its digest is not that of its name" in caplog.text
    assert store.versions == (1,)
