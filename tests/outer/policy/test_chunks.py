"""Leases of data: each sample counts once in a pass, whoever comes, goes, is late or says wrong things."""

import json
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spantrain.config.files.json_codec import from_json, to_json
from spantrain.outer.policy.chunks import ChunkLedger, ChunkState

LEASE_S = 10.0


def ledger(samples: int = 20, chunks: int = 5, *, passes: int | None = 1) -> ChunkLedger:
    return ChunkLedger(ChunkState(samples=samples, chunks=chunks, passes=passes), lease_s=LEASE_S, now_s=0.0)


@given(st.integers(1, 20), st.integers(1, 3), st.data())
def test_each_sample_counts_once_in_each_pass(samples, passes, data):
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    chunks = data.draw(st.integers(1, samples))
    made = ledger(samples, chunks, passes=passes)
    now_s, leases, seen = 0.0, [], Counter()
    while not made.state.finished:
        now_s += chance.choice([0.1, 1.0, 11.0])
        made.expire(now_s)
        if chance.random() < 0.1:
            kept = from_json(ChunkState, to_json(made.state), "chunks")
            made = ChunkLedger(kept, lease_s=LEASE_S, now_s=now_s)
        cluster = chance.choice("abc")
        taken = made.lease(now_s, cluster)
        leases = ([*leases, taken] if taken else leases)[-4:]
        for lease in chance.sample(leases, min(2, len(leases))):
            upto = chance.randint(lease.begin, lease.end)
            whole, begin = made.state.at(lease.chunk)
            before = whole * made.state.size(lease.chunk) + begin
            counted = made.report(now_s, lease.cluster, lease.number, upto)
            seen.update((lease.chunk, before + k) for k in range(counted))
        if chance.random() < 0.1:
            made.end(made.of(cluster))
    assert made.state.counted == samples * passes == sum(seen.values())
    assert set(seen.values()) == {1}


def test_no_chunk_is_on_two_leases():
    made = ledger(20, 5)
    leases = [made.lease(0.0, cluster) for cluster in "aabbcc"]
    assert [lease.chunk for lease in leases[:5]] == [0, 1, 2, 3, 4]
    assert leases[5] is None
    assert not made.state.finished


def test_what_a_lost_cluster_began_goes_to_the_next_that_asks_from_where_it_was_counted():
    made = ledger()
    first = made.lease(0.0, "a")
    made.report(1.0, "a", first.number, 3)
    assert made.expire(10.9) == ()
    assert made.expire(11.0) == (first,)
    again = made.lease(11.0, "b")
    assert (again.chunk, again.begin, again.number) == (0, 3, 1)
    assert made.report(12.0, "a", first.number, 4) == 0, "it is not a's any more"


def test_a_lease_that_is_renewed_does_not_end():
    made = ledger()
    made.lease(0.0, "a")
    for now_s in (9.0, 18.0, 27.0):
        made.renew(now_s, "a")
        assert made.expire(now_s + 9.0) == ()


def test_a_slow_cluster_does_not_keep_the_others_from_the_next_pass():
    made = ledger(4, 2, passes=2)
    made.lease(0.0, "slow")
    for data_pass in (0, 1):
        lease = made.lease(0.0, "fast")
        assert (lease.chunk, lease.data_pass) == (1, data_pass)
        made.report(0.0, "fast", lease.number, lease.end)
    assert made.lease(0.0, "fast") is None


def test_reports_that_make_no_sense_count_nothing():
    made = ledger()
    lease = made.lease(0.0, "a")
    for cluster, number, upto in [("b", lease.number, 2), ("a", 7, 2), ("a", lease.number, 5)]:
        assert made.report(0.0, cluster, number, upto) == 0
    assert made.state.counted == 0


def test_a_million_chunks_cost_what_is_on_lease():
    """A lease of one took a second, and six to write its state, of 27 MB, down."""
    made = ledger(10**7, 10**6, passes=2)
    for _ in range(300):
        lease = made.lease(0.0, "a")
        made.report(0.0, "a", lease.number, lease.end)
    begun = made.lease(0.0, "b")
    made.report(0.0, "b", begun.number, 4)
    assert made.state.counted == 3004
    kept = to_json(made.state)
    assert len(json.dumps(kept)) < 1000
    assert from_json(ChunkState, kept, "chunks") == made.state
    assert [made.state.at(chunk) for chunk in (299, 300, 301, 10**6 - 1)] == [(1, 0), (0, 4), (0, 0), (0, 0)]


@pytest.mark.parametrize(
    "runs", [(), ((1, 0, 0),), ((0, 0, 0), (0, 1, 0)), ((0, 0, 0), (5, 1, 0)), ((0, 0, 4),), ((0, -1, 0),)]
)
def test_runs_must_be_of_the_chunks(runs):
    with pytest.raises(ValueError, match="runs must"):
        ChunkState(samples=20, chunks=5, runs=runs)


@pytest.mark.parametrize(("samples", "chunks"), [(3, 4), (3, 0)])
def test_chunks_must_have_samples(samples, chunks):
    with pytest.raises(ValueError, match="chunks must be from 1 to the number of samples"):
        ChunkState(samples=samples, chunks=chunks)
