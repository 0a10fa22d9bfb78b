"""What one joined cluster can do to the others: nobody waits for it, or steps less, and it keeps nothing for itself."""

import pytest

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.events import LayerTransfer, PushOutcome, Ticket, TransferWay
from spantrain.outer.policy.chunks import ChunkLedger, ChunkState
from spantrain.outer.policy.liveness import StuckShards, Trainers
from spantrain.outer.policy.transfers import TransferSchedule
from testing.outer.policy import MadeUpWorld
from testing.outer.training import last_window, learn, say, seeded_world


def rounds(made: MadeUpWorld, count: int, *names: str) -> list[float]:
    """Let clusters train and push, so many times; return the parts of a step."""
    parts = []
    for _ in range(count):
        learn(made, *names)
        for name in names:
            say(made, name, made.clusters[name].ask())
        made.settle()
        parts.append(made.master.updates.last.part)
        made.pass_time(1.0)
    return parts


# Who only looks on.


def test_nobody_waits_for_a_cluster_that_only_evaluates_and_it_makes_no_step_smaller():
    made = seeded_world(3, grace_s=60.0, samples=60, chunks=20)
    made.pass_time(1.0)
    before = made.master.state.updates
    assert rounds(made, 4, "c0", "c1") == [1.0] * 4
    assert made.master.state.updates == before + 4, "no window lasted for the grace"
    assert made.master.clusters == ("c0", "c1", "c2")


def test_who_only_evaluates_gets_versions_when_it_asks():
    made = seeded_world(2, samples=60, chunks=20)
    rounds(made, 2, "c0")
    assert made.clusters["c1"].base < made.master.state.version
    made.tell(on.PullAsked(cluster="c1"))
    made.settle()
    assert made.clusters["c1"].base == made.master.state.version


def test_who_says_that_it_trains_and_pushes_nothing_is_waited_for_no_longer_than_others_take():
    made = seeded_world(3, grace_s=0.5, samples=120, chunks=40)
    rounds(made, 3, "c0", "c1")
    made.tell(on.TrainingBegun(cluster="c2"))
    assert made.master.trains(made.now_s) == ("c0", "c1", "c2")
    for _ in range(2):
        rounds(made, 10, "c0", "c1")
        made.tell(on.TrainingBegun(cluster="c2"))
        assert made.master.trains(made.now_s) == ("c0", "c1")


def test_who_evaluates_after_training_is_soon_not_counted_and_again_with_its_next_push():
    made = seeded_world(2, grace_s=0.5, samples=120, chunks=40)
    rounds(made, 3, "c0", "c1")
    rounds(made, 8, "c0")
    assert made.master.trains(made.now_s) == ("c0",)
    rounds(made, 1, "c1")
    assert made.master.trains(made.now_s) == ("c0", "c1")


def test_after_a_time_in_which_nothing_was_taken_nobody_is_to_blame():
    trainers = Trainers(least_s=10.0)
    for now_s in (0.0, 5.0, 10.0):
        trainers.pushed(now_s, "a")
    assert trainers.of(100.0, ["a"]) == ()
    trainers.resume(100.0)
    assert trainers.of(105.0, ["a"]) == ("a",)


# Windows and rounds.


def test_a_round_that_was_ended_too_early_is_ended_again_by_who_really_has():
    made = seeded_world(3, grace_s=60.0, samples=60, chunks=20)
    learn(made, "c0", "c1", "c2")
    for name in ("c0", "c1"):
        say(made, name, made.clusters[name].ask())
    made.settle()
    made.pass_time(61.0)
    made.settle()
    say(made, "c2", made.clusters["c2"].ask(ends_round=True))
    while not made.lines["c0"]:
        made.deliver("up c2")
    made.settle()
    learn(made, "c0", "c1")
    before = made.master.state.updates
    say(made, "c0", made.clusters["c0"].ask(ends_round=True))
    made.settle()
    assert made.master.state.updates > before
    assert {"c0", "c1"} <= last_window(made)


def test_who_was_left_out_ends_nobodys_round():
    made = seeded_world(3, grace_s=60.0, samples=60, chunks=20)
    made.clusters["c2"].spoiled = True
    rounds(made, 1, "c0", "c1", "c2")
    assert made.master.state.clusters["c2"].last_left_out
    learn(made, "c0", "c2")
    say(made, "c2", made.clusters["c2"].ask(ends_round=True))
    made.settle()
    assert made.clusters["c0"].client.phase.value == "free"


def test_who_asks_twice_has_one_push_under_way():
    made = seeded_world(1, samples=60, chunks=20)
    made.now_s += 1.0
    made.tell(on.TrainingBegun(cluster="c0"))
    asked = on.PushAsked(cluster="c0", base_version=made.master.state.version, tokens=10)
    (start,) = [one for one in made.master.on_event(made.now_s, asked) if isinstance(one, do.StartPush)]
    again = made.master.on_event(made.now_s, asked)
    (ended,) = [one for one in again if isinstance(one, do.RefusePush)]
    (begun,) = [one for one in again if isinstance(one, do.StartPush)]
    assert ended.push == start.push != begun.push
    assert {one.ticket for one in again if isinstance(one, do.Forget)} == {start.push}


def test_a_question_that_outlives_its_connection_keeps_no_later_push_waiting():
    """What a connection that has ended had asked reaches the master behind the new registration."""
    made = seeded_world(1, samples=60, chunks=20)
    client = made.clusters["c0"].client
    learn(made, "c0")
    (stale,) = client.ask(tokens=10)
    made.now_s += 1.0
    registered = client.registered(made.now_s)[-1]
    for event in (registered, stale):
        for command in made.master.on_event(made.now_s, event):
            if "c0" in command.recipients:
                client.on_command(made.now_s, command)
    assert client.phase.value == "free"
    made.now_s += 1.0
    assert client.may_ask(made.now_s)
    (asked,) = client.ask(tokens=10)
    for command in made.master.on_event(made.now_s, asked):
        if "c0" in command.recipients:
            client.on_command(made.now_s, command)
    assert client.phase.value == "sending"


def test_nobody_adopts_the_push_of_another():
    made = seeded_world(2, grace_s=60.0)
    learn(made, "c0", "c1")
    say(made, "c0", made.clusters["c0"].ask())
    made.settle()
    (push,) = [one.ticket for one in made.master.updates.pending]
    workers = made.clusters["c1"].workers[0]
    commands = made.master.on_event(
        made.now_s, on.ClusterRegistered(cluster="c1", workers=workers, unresolved=push)
    )  # fmt: skip
    (welcome,) = [one for one in commands if isinstance(one, do.Welcome)]
    assert welcome.fate is PushOutcome.SKIPPED


# Data.


def test_one_of_several_has_no_more_than_half_of_the_chunks():
    made = seeded_world(2, samples=60, chunks=20)
    for _ in range(30):
        made.tell(on.ChunkAsked(cluster="c1"))
    assert len(made.master.members.leases("c1")) == 10
    refused = made.lines["c1"][-1]
    assert refused == do.LeaseNothing(cluster="c1", finished=False, reason="it has 10 chunks, at most 10 at once")


def test_a_chunk_in_which_its_cluster_comes_no_further_is_given_to_who_has_nothing():
    ledger = ChunkLedger(ChunkState(samples=20, chunks=2, passes=1), lease_s=60.0, now_s=0.0)
    first, second = ledger.lease(0.0, "a"), ledger.lease(0.0, "a")
    ledger.report(50.0, "a", second.number, 3)
    for now_s in (30.0, 60.0, 90.0):
        ledger.renew(now_s, "a")
    assert ledger.take_back(59.0, lambda _: 0.0) == ()
    assert ledger.take_back(61.0, lambda _: 200.0) == (), "it pushes seldom"
    assert ledger.take_back(61.0, lambda _: 0.0) == (first,)
    assert ledger.lease(61.0, "b").chunk == first.chunk
    assert ledger.take_back(109.0, lambda _: 0.0, but=[second.number]) == ()


@pytest.mark.parametrize("field", ["tokens", "progress"])
def test_absurd_numbers_are_refused(field):
    absurd = {"tokens": 2**48 + 1} if field == "tokens" else {"progress": (on.ChunkProgress(lease=0, upto=1),) * 1025}
    with pytest.raises(ValueError, match="tokens must be 0 to 2" if field == "tokens" else "1025 chunks, it may have"):
        on.PushAsked(**{"cluster": "h", "base_version": 1, "tokens": 1, **absurd})


# Lines.


def layer(cluster: str, number: int, shard: str = "s", *, ticket: int = 0) -> LayerTransfer:
    return LayerTransfer(
        ticket=Ticket(0, ticket), cluster=cluster, worker=cluster, layer=number, shard=shard, size_bytes=100
    )  # fmt: skip


def test_layers_that_never_come_keep_a_shard_for_a_moment_only():
    schedule = TransferSchedule({"s": 2}, 2, patience_s=8.0)
    schedule.add([layer("a", 0)])
    schedule.end(0.5, schedule.begin(0.0)[0])
    schedule.add([layer("h", number, ticket=1) for number in range(4)])
    assert len(schedule.begin(1.0)) == 2
    schedule.add([layer("a", number, ticket=2) for number in range(4)])
    assert not schedule.begin(1.1)
    assert schedule.slow_s == 5.0, "eight times as long as the last one"
    assert [one.cluster for one in schedule.begin(5.0)] == ["a", "a"]
    assert schedule.slow_s > 5.0, "the master need not look before"


def test_who_was_slow_comes_after_the_others():
    schedule = TransferSchedule({"s": 1}, patience_s=8.0)
    schedule.add([layer("h", number, ticket=1) for number in range(9)])
    schedule.begin(0.0)
    schedule.drop(Ticket(0, 1))
    schedule.add([layer("h", number, ticket=2) for number in range(9)])
    schedule.add([layer("a", 0, ticket=3)])
    (first,) = schedule.begin(1.0)
    assert first.cluster == "a"


# Shards.


def shards() -> StuckShards:
    return StuckShards(["s0", "s1"], patience_s=10.0)


def test_one_cluster_alone_cannot_have_a_shard_ended():
    stuck = shards()
    stuck.failed(0.0, layer("h", 0, "s0"))
    stuck.moved(layer("h", 1, "s1"))
    assert not stuck.at(100.0, ["a", "h"], 2)
    stuck.moved(layer("a", 0, "s0"))
    stuck.moved(layer("b", 0, "s0"))
    stuck.failed(0.0, layer("g", 0, "s0"))
    stuck.moved(layer("g", 1, "s1"))
    assert not stuck.at(100.0, ["a", "b", "h", "g"], 4), "two of four are not most"


def test_a_shard_that_gets_through_to_nobody_is_to_be_started_anew():
    stuck = shards()
    for number, name in enumerate("ab"):
        stuck.failed(5.0 * number, layer(name, 0, "s0"))
        stuck.moved(layer(name, 1, "s1"))
    assert not stuck.at(14.9, ["a", "b"], 2)
    ((shard, reason),) = stuck.at(15.0, ["a", "b"], 2)
    assert shard == "s0"
    assert reason == "it answers, but for 10 s no layer got through between it and a, b"
    stuck.forget("s0")
    assert not stuck.at(100.0, ["a", "b"], 2)


def test_a_line_that_is_cut_to_all_shards_is_no_shards_fault():
    stuck = shards()
    for name in "ab":
        for shard in ("s0", "s1"):
            stuck.failed(0.0, layer(name, 0, shard))
    assert not stuck.at(100.0, ["a", "b"], 2)


def test_the_master_ends_a_shard_that_moves_no_layers_and_all_goes_on_when_it_is_back():
    made = seeded_world(2, 2, samples=60, chunks=20, lost_after_s=10.0)
    rounds(made, 1, "c0", "c1")
    for name in made.memories:
        made.snapshot(name)
    made.settle()
    told: list[do.StartAnew] = []
    for _ in range(30):
        learn(made, "c0", "c1")
        for name in ("c0", "c1"):
            say(made, name, made.clusters[name].ask())
        _lose_layers_at(made, "s1")
        made.pass_time(1.0)
        told += [one for one in made.lines["s1"] if isinstance(one, do.StartAnew)]
        if told:
            break
    assert [one.shard for one in told] == ["s1"]
    made.kill("s1")
    made.revive("s1")
    made.settle()
    before = made.master.state.updates
    rounds(made, 1, "c0", "c1")
    assert made.master.state.updates == before + 1


def _lose_layers_at(made: MadeUpWorld, shard: str) -> None:
    """Let all messages arrive, but for layers at a shard, which its wire says are lost."""
    while busy := made.busy_lines:
        line = busy[0]
        message = made.lines[line][0]
        if line == shard and isinstance(message, tuple) and isinstance(message[0], LayerTransfer):
            made.lines[line].popleft()
            made.tell(on.TransferLost(way=TransferWay.PUSH, transfer=message[0], reason="the layer wire is closed"))
        elif isinstance(message, do.StartAnew):
            return
        else:
            made.deliver(line)
