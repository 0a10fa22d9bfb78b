"""Layers between workers and shards: nobody is crowded, nobody waits for nothing, all arrives once."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spantrain.core.outer.events import LayerTransfer, Ticket
from spantrain.outer.policy.transfers import TransferSchedule

TICKET = Ticket(0, 0)


def transfer(
    cluster: str, worker: str, layer: int, shard: str, size: int = 1, ticket: Ticket = TICKET
) -> LayerTransfer:
    return LayerTransfer(ticket=ticket, cluster=cluster, worker=worker, layer=layer, shard=shard, size_bytes=size)


WORK = st.lists(
    st.builds(
        lambda cluster, worker, shard, size: (cluster, worker, shard, size),
        st.sampled_from("ab"), st.sampled_from("vwx"), st.sampled_from("stu"), st.integers(1, 9),
    ),
    max_size=25,
)  # fmt: skip


def turns(work: list[LayerTransfer], shards: str, slots: int = 1) -> list[list[tuple[str, str]]]:
    """Move layers of one size, all in step."""
    schedule = TransferSchedule(dict.fromkeys(shards, slots), patience_s=10.0)
    schedule.add(work)
    taken = []
    while begun := schedule.begin(0.0):
        taken.append([(f"{move.cluster}{move.worker}", move.shard) for move in begun])
        for move in begun:
            assert schedule.end(0.0, move)
    return taken


@given(WORK, st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32))
def test_nothing_is_crowded_nothing_idles_and_all_arrives_once(work, slots, worker_slots, seed):
    chance = random.Random(seed)
    layers = [transfer(cluster, worker, k, shard, size) for k, (cluster, worker, shard, size) in enumerate(work)]
    schedule = TransferSchedule(dict.fromkeys("stu", slots), worker_slots, patience_s=10.0)
    schedule.add(layers)
    arrived: Counter[LayerTransfer] = Counter()
    while len(arrived) < len(layers):
        begun = schedule.begin(0.0)
        assert schedule.begin(0.0) == ()
        workers = Counter((move.cluster, move.worker) for move in schedule.running)
        shards = Counter(move.shard for move in schedule.running)
        assert 1 <= max(workers.values()) <= worker_slots
        assert max(shards.values()) <= slots
        assert set(begun) <= schedule.running.keys()
        waiting = [one for one in layers if one not in arrived and one not in schedule.running]
        free = [one for one in waiting if workers[one.cluster, one.worker] < worker_slots and shards[one.shard] < slots]
        assert not free, "a worker and a shard with a layer between them both wait"
        done = chance.choice(sorted(schedule.running))
        assert schedule.end(0.0, done)
        arrived[done] += 1
    assert set(arrived) == set(layers)
    assert set(arrived.values()) <= {1}


@given(WORK)
def test_layers_of_one_size_take_no_more_turns_than_the_busiest_has_layers(work):
    layers = [transfer(cluster, worker, k, shard) for k, (cluster, worker, shard, _) in enumerate(work)]
    workers = Counter((one.cluster, one.worker) for one in layers)
    shards = Counter(one.shard for one in layers)
    assert len(turns(layers, "stu")) == max([0, *workers.values(), *shards.values()])


def test_more_workers_than_shards_take_turns():
    """Figure 5, case a: two clusters of two workers, two shards; four turns, both shards busy in each."""
    layers = [
        transfer(cluster, worker, 2 * k + j, shard)
        for cluster in "ab" for k, worker in enumerate("vw") for j, shard in enumerate("st")
    ]  # fmt: skip
    taken = turns(layers, "st")
    assert len(taken) == 4
    assert all(sorted(shard for _, shard in turn) == ["s", "t"] for turn in taken)


def test_fewer_workers_than_shards_go_round_them():
    """Figure 5, case b: two workers, three shards; three turns, no shard twice in one."""
    layers = [transfer("a", worker, 3 * k + j, shard) for k, worker in enumerate("vw") for j, shard in enumerate("stu")]
    taken = turns(layers, "stu")
    assert len(taken) == 3
    assert all(len({shard for _, shard in turn}) == len(turn) == 2 for turn in taken)


def test_second_slots_are_filled_when_no_more_first_ones_can_be():
    schedule = TransferSchedule({"s": 2, "t": 2}, worker_slots=2, patience_s=10.0)
    schedule.add([transfer("a", worker, k, shard) for k, worker in enumerate("vw") for shard in "st"])
    begun = schedule.begin(0.0)
    first, second = begun[:2], begun[2:]
    assert {one.worker for one in first} == {one.worker for one in second} == {"v", "w"}
    assert {one.shard for one in first} == {one.shard for one in second} == {"s", "t"}


def test_what_is_dropped_frees_both_ends_and_never_begins():
    schedule = TransferSchedule({"s": 1}, patience_s=10.0)
    schedule.add([transfer("a", "w", 0, "s"), transfer("a", "w", 1, "s")])
    other = transfer("b", "w", 0, "s", ticket=Ticket(0, 1))
    schedule.add([other])
    (begun,) = schedule.begin(0.0)
    assert begun.ticket == TICKET
    schedule.drop(TICKET)
    assert not schedule.end(0.0, begun)
    assert schedule.begin(0.0) == (other,)


def test_a_shard_needs_a_slot():
    with pytest.raises(ValueError, match="each shard and worker needs a slot"):
        TransferSchedule({"s": 0}, patience_s=10.0)
    with pytest.raises(ValueError, match="each shard and worker needs a slot"):
        TransferSchedule({"s": 1}, worker_slots=0, patience_s=10.0)
