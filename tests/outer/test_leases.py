"""Data that the master leases: each sample is counted once, whatever becomes of pushes, clusters and connections."""

import pytest

from spantrain.core.outer.events import ChunkProgress, Lease
from spantrain.errors import UsageError
from spantrain.outer.client.data import ChunkOrder
from spantrain.outer.policy.chunks import ChunkSpan, ChunkState, LeasedChunks
from testing.outer.clients import MadeUpServer, at_once, small_model
from testing.patience import PATIENCE_S


def lease(number: int, *, begin: int = 0, end: int = 10) -> Lease:
    return Lease(number=number, cluster="a", chunk=number, data_pass=0, begin=begin, end=end)


def test_samples_are_handed_out_in_order_and_told_when_trained_on():
    chunks = LeasedChunks()
    chunks.hold(lease(0))
    chunks.hold(lease(1, begin=4))
    assert [(one.chunk, one.begin, one.end) for one in chunks.hand_out(12)] == [(0, 0, 10), (1, 4, 6)]
    assert chunks.progress == ()
    chunks.train(11)
    assert chunks.progress == (ChunkProgress(lease=0, upto=10), ChunkProgress(lease=1, upto=5))
    chunks.train(None)
    assert chunks.progress[1].upto == 6
    chunks.count((ChunkProgress(lease=0, upto=10), ChunkProgress(lease=1, upto=5)))
    assert chunks.numbers == (1,)
    assert chunks.left == 4


def test_it_asks_ahead_and_once():
    chunks = LeasedChunks()
    assert chunks.ask(0.0)
    assert not chunks.ask(0.0), "an answer comes first"
    assert chunks.unanswered_s(3.0) == 3.0
    chunks.hold(lease(0))
    assert chunks.unanswered_s(3.0) == 0.0
    assert chunks.ask(0.0), "one more, ahead"
    chunks.hold(lease(1))
    assert not chunks.ask(0.0)
    chunks.hand_out(10)
    assert chunks.ask(0.0)
    chunks.nothing(5.0, finished=False)
    assert not chunks.ask(5.5)
    assert chunks.ask(6.5)
    chunks.connect()
    assert chunks.ask(6.5), "what an earlier connection may have lost"
    chunks.nothing(7.0, finished=True)
    assert not chunks.ask(100.0)


def test_what_others_have_by_now_is_dropped():
    chunks = LeasedChunks()
    chunks.hold(lease(0))
    chunks.hold(lease(1))
    chunks.hand_out(15)
    chunks.train(None)
    chunks.keep((1,))
    assert chunks.progress == (ChunkProgress(lease=1, upto=5),)


@pytest.mark.parametrize("seed", [None, 3])
def test_places_in_chunks_are_the_samples_that_the_master_counts(seed):
    state = ChunkState(samples=37, chunks=5)
    order = ChunkOrder(37, 5, seed=seed)
    for data_pass in (0, 1):
        spans = [ChunkSpan(chunk=k, data_pass=data_pass, begin=0, end=state.size(k)) for k in range(state.chunks)]
        assert sorted(order.indices(spans)) == list(range(37))
    if seed is not None:
        first, again, next_pass = (
            ChunkOrder(37, 5, seed=seed).indices((ChunkSpan(chunk=2, data_pass=k, begin=0, end=7),)) for k in (0, 0, 1)
        )
        assert first == again != next_pass


def test_two_clusters_see_every_sample_of_two_passes_once():
    models = {"a": small_model(0), "b": small_model(1)}
    seen: dict[str, list[int]] = {"a": [], "b": []}
    with MadeUpServer(samples=60, chunks=6, passes=2) as server:

        def train(name: str) -> None:
            with server.optimizer(models[name].named_parameters(), name, inner_steps=3) as outer:
                for batch in outer.data(60, batch_samples=4):
                    seen[name] += batch
                    outer.step(tokens=len(batch))
                assert outer.metrics.uncounted_samples == 0

        at_once(models, train)
        assert server.master.state.leading.chunks.counted == 120
    assert sorted(seen["a"] + seen["b"]) == sorted([*range(60)] * 2)


def test_a_batch_is_as_large_as_was_asked_for_however_small_chunks_are():
    """With chunks of 5 samples batches had 10, two chunks, whatever was asked for."""
    model, sizes, seen = small_model(), [], []
    with MadeUpServer(samples=200, chunks=40) as server:
        with server.optimizer(model.named_parameters(), "a", inner_steps=2) as outer:
            for batch in outer.data(200, batch_samples=32):
                sizes.append(len(batch))
                seen += batch
                outer.step(tokens=len(batch))
        assert server.master.state.leading.chunks.finished
    assert sizes == [32] * 6 + [8]
    assert sorted(seen) == list(range(200))


def test_one_cluster_ends_when_all_is_counted():
    model = small_model()
    with (
        MadeUpServer(samples=50, chunks=4, passes=2) as server,
        server.optimizer(model.named_parameters(), "a", inner_steps=5) as outer,
    ):
        seen = []
        for batch in outer.data(50, batch_samples=4):
            seen += batch
            outer.step(tokens=len(batch))
        assert sorted(seen) == sorted([*range(50)] * 2)
        assert server.master.state.leading.chunks.counted == 100
        assert outer.finish(PATIENCE_S)


def test_steps_go_on_without_a_master_on_samples_that_do_not_count():
    model = small_model()
    with MadeUpServer(samples=50, chunks=4) as server:
        server.away.add("a")
        with server.optimizer(model.named_parameters(), "a", wait_for_start_s=0.01, wait_for_data_s=0.01) as outer:
            loop = iter(outer.data(50, batch_samples=4))
            for _ in range(3):
                assert all(0 <= index < 50 for index in next(loop))
                outer.step(tokens=4)
            assert outer.metrics.uncounted_samples == 12
            server.do(lambda: server.mend("a"))
            seen = []
            uncounted = 12
            for batch in loop:
                # Where the machine is busy an answer may take longer than this cluster waits for one.
                seen += batch if outer.metrics.uncounted_samples == uncounted else []
                uncounted = outer.metrics.uncounted_samples
                outer.step(tokens=4)
            assert sorted(seen) == list(range(50))


def test_steps_go_on_when_the_master_stops_answering_and_nobody_has_noticed():
    """Its connection is still there: only the question for data is not answered."""
    with MadeUpServer(samples=40, chunks=10) as server:
        outer = server.optimizer(small_model().named_parameters(), "a", wait_for_data_s=0.01)
        server.do(lambda: setattr(server, "hook", lambda command: type(command).__name__ != "LeaseChunk"))
        batches = iter(outer.data(40, batch_samples=4))
        counted = 0
        while not outer.metrics.uncounted_samples:
            assert counted <= 40
            counted += len(next(batches))
            outer.step()
        assert len(next(batches)) == 4
        assert outer.metrics.uncounted_samples == 8
        outer.close()


def test_a_cluster_that_was_cut_off_goes_on_with_its_chunks():
    model = small_model()
    with MadeUpServer(samples=40, chunks=2) as server, server.optimizer(model.named_parameters(), "a") as outer:
        seen = []
        for number, batch in enumerate(outer.data(40, batch_samples=4)):
            seen += batch
            outer.step(tokens=4)
            if number == 3:
                server.do(lambda: server.cut("a"))
            if number == 4:
                server.do(lambda: server.mend("a"))
        assert sorted(seen) == list(range(40))
        assert server.master.state.leading.chunks.counted == 40


def test_a_loader_that_fetches_ahead_ends_and_may_begin_again():
    """Where nothing is free it must not wait in the loader: what it fetched would never be trained on."""
    model = small_model()
    with MadeUpServer(samples=40, chunks=2) as server, server.optimizer(model.named_parameters(), "a") as outer:
        batches, seen = outer.data(40, batch_samples=4), []
        while not batches.finished:
            fetched: list[list[int]] = []
            for batch in batches:
                fetched.append(batch)
                if len(fetched) > 3:
                    seen += fetched.pop(0)
                    outer.step(tokens=4, samples=4)
            for batch in fetched:
                seen += batch
                outer.step(tokens=4, samples=4)
            assert outer.finish(PATIENCE_S)
        assert sorted(seen) == list(range(40))


def test_data_of_another_length_is_refused():
    model = small_model()
    with MadeUpServer() as server, server.optimizer(model.named_parameters(), "a") as outer:
        with pytest.raises(UsageError, match="does not lease data of 50 samples"):
            next(iter(outer.data(50, batch_samples=4)))
        with pytest.raises(UsageError, match="must be at least 1, got 0 and 4"):
            outer.data(0, batch_samples=4)
