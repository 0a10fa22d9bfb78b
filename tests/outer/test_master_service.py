"""The master apart from network and clock: batches once, state before commands, members that do not fetch, or go."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.commands import OuterCommand
from spantrain.core.outer.events import OuterEvent, TransferWay
from spantrain.errors import ProtocolError
from spantrain.outer.link.codec import decode_command
from spantrain.outer.link.link import MasterWelcome, MemberFacts
from spantrain.outer.master.config import MasterConfig
from spantrain.outer.master.connections import NoticeQueue
from spantrain.outer.master.files import MasterFiles, StateNotKept
from spantrain.outer.master.report import status_of
from spantrain.outer.master.service import MasterService
from spantrain.outer.policy.fragments import FragmentedState
from spantrain.outer.policy.settings import MasterState, OuterSettings
from spantrain.transport.control.protocol import MESSAGE_LIMIT_BYTES, RemoteRefusal, decode
from testing.outer.links import LAYERS, WHOLE, cluster_facts, shard_facts

CONFIG = MasterConfig(
    shards=("s0",), settings=OuterSettings(grace_s=0.0, lost_after_s=10.0), samples=8, chunks=4, encrypted=False
)


class ServiceMembers:
    """A service, and what is said to it."""

    def __init__(self, files: MasterFiles, outbox_limit: int = 1000) -> None:
        self.files = files
        self.service = MasterService(CONFIG, files, 0.0, outbox_limit=outbox_limit)
        self.numbers: dict[str, int] = {}
        self.batches: dict[str, int] = {}
        self.fetched: dict[str, int] = {}

    def enter(self, name: str, facts: MemberFacts, now_s: float = 0.0) -> MasterWelcome:
        self.numbers[name], welcome = self.service.enter(now_s, name, facts)
        self.batches[name] = self.fetched[name] = 0
        return welcome

    def tell(self, name: str, *events: OuterEvent, now_s: float = 0.0) -> tuple[str, ...]:
        self.batches[name] += 1
        return self.service.tell(now_s, name, self.numbers[name], self.batches[name], events)

    def fetch(self, name: str) -> list[OuterCommand]:
        outbox = self.service.outbox(0.0, name, self.numbers[name])
        first, bodies = outbox.take(self.fetched[name], timeout_s=0.0)
        self.fetched[name] = first + len(bodies) - 1
        notices = [decode(body, limit_bytes=MESSAGE_LIMIT_BYTES) for body in bodies]
        return [decode_command(notice["command"]) for notice in notices if "command" in notice]


def test_who_was_started_again_takes_the_place_of_one_that_is_silent(files: MasterFiles) -> None:
    made = ServiceMembers(files)
    first, again = (replace(cluster_facts(), process=f"process {number} on lab") for number in (1, 2))
    made.enter("a", first, now_s=10.0)
    made.service.join(10.1, "a", first.brief)
    with pytest.raises(RemoteRefusal, match="cluster a is there already, process 1 on lab: take another name"):
        made.service.join(12.4, "a", again.brief)
    made.tell("a", now_s=12.4)
    with pytest.raises(RemoteRefusal, match="cluster a is there already"):
        made.service.join(14.8, "a", again.brief)
    made.service.join(15.0, "a", again.brief)
    made.enter("a", again, now_s=15.0)
    with pytest.raises(RemoteRefusal, match="process 2 on lab"):
        made.service.join(15.1, "a", first.brief)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[MasterFiles]:
    made = MasterFiles(tmp_path / "state")
    yield made
    made.close()


def ready(files: MasterFiles, workers: dict[str, tuple[int, ...]] | None = None, **more: Any) -> ServiceMembers:
    service = ServiceMembers(files, **more)
    service.enter("s0", shard_facts())
    service.enter("a", cluster_facts())
    for name in workers or {}:
        if name != "a":
            service.enter(name, MemberFacts(kind="worker", public_key=""))
    assert not service.tell("s0", on.ShardRegistered(shard="s0", versions=()))
    assert not service.tell("a", on.ClusterRegistered(cluster="a", workers=workers or {"a": WHOLE}))
    return service


def moves(commands: list[OuterCommand]) -> list[do.Move]:
    return [command for command in commands if isinstance(command, do.Move)]


def test_a_batch_that_comes_twice_counts_once(files: MasterFiles) -> None:
    service = ready(files)
    asked = on.ChunkAsked(cluster="a")
    for _ in range(3):
        assert service.service.tell(0.0, "a", service.numbers["a"], 2, (asked,)) == ()
    leases = [command for command in service.fetch("a") if isinstance(command, do.LeaseChunk)]
    assert [lease.lease.number for lease in leases] == [0]


def test_notices_that_wait_are_bounded_by_their_bytes_too() -> None:
    outbox = NoticeQueue(limit=20_000)
    large = {"text": "x" * (4 * 2**20)}
    assert [outbox.put(large) for _ in range(18)] == [True] * 16 + [False] * 2
    outbox.take(0, timeout_s=0.0)
    outbox.take(1, timeout_s=0.0)
    assert outbox.put(large), "one was fetched"


def test_20000_notices_may_wait_for_a_member(files: MasterFiles) -> None:
    service = MasterService(CONFIG, files, 0.0)
    outbox = service.connections.open(0.0, "a", cluster_facts()).outbox
    assert all(outbox.put({"a": 0}) for _ in range(20_000))
    assert not outbox.put({"a": 0})


def test_what_was_not_fetched_is_given_again(files: MasterFiles) -> None:
    service = ready(files)
    first = service.fetch("a")
    assert [type(command) for command in first] == [do.Welcome]
    service.fetched["a"] = 0
    with pytest.raises(RemoteRefusal, match="no notice 9"):
        service.service.outbox(0.0, "a", service.numbers["a"]).take(9, timeout_s=0.0)
    assert service.fetch("a") == first
    service.tell("a", on.ChunkAsked(cluster="a"))
    assert [type(command) for command in service.fetch("a")] == [do.LeaseChunk]


def test_the_state_is_kept_before_any_command_that_needs_it(files: MasterFiles) -> None:
    service = ready(files)
    service.tell("a", on.ChunkAsked(cluster="a"))
    assert service.fetch("a")
    kept = files.load_state(CONFIG).leading
    assert kept.chunks
    assert [lease.cluster for lease in kept.chunks.leases] == ["a"]
    assert kept.epoch == 1


def test_a_state_that_cannot_be_kept_gives_no_command(files: MasterFiles, tmp_path: Path) -> None:
    service = ready(files)
    service.fetch("a")
    (tmp_path / "state" / "state.json").unlink()
    (tmp_path / "state" / "state.json").mkdir()
    with pytest.raises(StateNotKept, match=r"state\.json: cannot be written"):
        service.tell("a", on.ChunkAsked(cluster="a"))
    assert service.fetch("a") == []


def test_that_all_versions_are_lost_is_said(files: MasterFiles, caplog: pytest.LogCaptureFixture) -> None:
    chunks = CONFIG.first_state().leading.chunks
    files.save(FragmentedState(fragments=(MasterState(version=3, seeded=True, next_version=4, chunks=chunks),)))
    service = ready(files)
    assert "the shards hold no version in common any more" in caplog.text
    assert not service.service.state.seeded


def test_who_does_not_fetch_is_dropped_and_nobody_else(files: MasterFiles) -> None:
    service = ready(files, outbox_limit=3)
    assert service.service.master
    for _ in range(4):
        service.tell("a", on.ChunkAsked(cluster="a"))
        if "a" not in service.service.master.clusters:
            break
    assert service.service.master.clusters == ()
    assert service.service.refusals.snapshot() == {"does_not_fetch": 1}
    with pytest.raises(RemoteRefusal, match="connection 2 of a has ended"):
        service.tell("a", on.ClusterBeat(cluster="a"))
    assert service.service.master.parts[0].shards.present == ("s0",)
    assert service.enter("a", cluster_facts()).layout is not None


def test_a_move_reaches_the_shard_the_worker_and_the_leader(files: MasterFiles) -> None:
    service = ready(files, {"a": WHOLE[:2], "a/w1": WHOLE[2:]})
    service.tell("a", on.PushAsked(cluster="a", base_version=0, tokens=0))
    told = {name: moves(service.fetch(name)) for name in ("s0", "a", "a/w1")}
    assert len(told["s0"]) == CONFIG.settings.shard_slots
    assert told["a"] == told["s0"]
    assert told["a/w1"] == [one for one in told["s0"] if one.transfer.worker == "a/w1"] != []


def test_a_push_over_a_worker_that_is_not_there_comes_to_nothing_at_once(files: MasterFiles) -> None:
    service = ready(files, {"a": WHOLE[:2], "a/w1": WHOLE[2:]})
    service.service.leave(1.0, "a/w1", "it left")
    service.fetch("a")
    service.tell("a", on.PushAsked(cluster="a", base_version=0, tokens=0))
    refusals = [command for command in service.fetch("a") if isinstance(command, do.RefusePush)]
    assert [one.reason for one in refusals] == ["layer 2: worker a/w1 is not connected"]


def test_a_push_ends_when_one_of_its_workers_goes(files: MasterFiles) -> None:
    service = ready(files, {"a": WHOLE[:2], "a/w1": WHOLE[2:]})
    service.tell("a", on.PushAsked(cluster="a", base_version=0, tokens=0))
    service.fetch("a")
    service.service.leave(1.0, "a/w1", "it left")
    assert [type(command) for command in service.fetch("a")] == [do.RefusePush]


def test_the_silent_are_dropped_and_the_others_told_of_their_peers(files: MasterFiles) -> None:
    service = ready(files)
    service.tell("s0", on.ShardBeat(shard="s0", versions=()), now_s=9.0)
    assert service.service.wake_s == 10.0
    service.service.tick(10.0)
    status = status_of(service.service, address="x:1", now_s=10.0)
    assert [one.state for one in status.clusters] == []
    assert [one.state for one in status.shards] == ["ready"]
    outbox = service.service.outbox(10.0, "s0", service.numbers["s0"])
    _, bodies = outbox.take(0, timeout_s=0.0)
    peers = [decode(body, limit_bytes=MESSAGE_LIMIT_BYTES).get("peers") for body in bodies]
    assert [[one["name"] for one in told] for told in peers if told is not None] == [["a"], []]


def test_registering_twice_needs_a_new_connection(files: MasterFiles) -> None:
    service = ready(files)
    with pytest.raises(RemoteRefusal, match="has registered on this connection"):
        service.tell("s0", on.ShardRegistered(shard="s0", versions=()))


def test_what_is_said_before_registering_is_dropped_and_counted(files: MasterFiles) -> None:
    service = ServiceMembers(files)
    service.enter("s0", shard_facts())
    assert service.tell("s0", on.ShardRegistered(shard="s0", versions=())) == (
        "s0: ShardRegistered before any cluster described the model",
    )
    service.enter("a", cluster_facts())
    assert service.tell("a", on.PullAsked(cluster="a")) == ()
    assert service.service.dropped == {"PullAsked before registering": 1}
    bad = on.ClusterRegistered(cluster="a", workers={"a": (0,)})
    assert service.tell("a", bad)[0].startswith("a: its workers must hold each of 5 layers once")
    assert service.tell("a", on.PullAsked(cluster="a")) == ()
    assert service.service.refusals.snapshot() == {"no_model": 1, "impossible": 1}


def test_rates_are_those_of_layers_that_arrived(files: MasterFiles) -> None:
    service = ready(files)
    service.tell("a", on.PushAsked(cluster="a", base_version=0, tokens=0), now_s=1.0)
    (first, *_) = moves(service.fetch("s0"))
    status = status_of(service.service, address="x:1", now_s=1.5)
    assert {(one.layer, one.since_s) for one in status.transfers} == {(0, 0.5), (1, 0.5)}
    service.tell("s0", on.Moved(way=TransferWay.PUSH, transfer=first.transfer), now_s=3.0)
    (link,) = status_of(service.service, address="x:1", now_s=3.0).links
    assert (link.cluster, link.shard, link.way, link.layers) == ("a", "s0", "push", 1)
    assert link.bytes_per_s == LAYERS[0].size_bytes / 2.0


def test_a_notice_over_the_limit_is_no_message() -> None:
    with pytest.raises(ProtocolError, match="send less"):
        NoticeQueue(limit=1).put({"x": bytes(MESSAGE_LIMIT_BYTES)})


def test_status_says_what_a_version_waits_for_that_does_not_come(files: MasterFiles) -> None:
    """A push each 8 s; then the shard takes no layer, and then it is gone."""
    service, now_s = ready(files), 0.0
    pushes(service, now_s, tokens=0)
    for _ in range(3):
        now_s += 8.0
        pushes(service, now_s)
    assert status_of(service.service, address="h:1", now_s=now_s).late_s is None
    asked = on.PushAsked(cluster="a", base_version=4, tokens=5)
    for now_s in range(29, 65, 5):
        service.tell("a", on.ClusterBeat(cluster="a"), now_s=now_s)
        service.tell("s0", on.ShardBeat(shard="s0", versions=(4,)), now_s=now_s)
        if now_s == 29:
            service.tell("a", asked, now_s=now_s)
    (one,) = status_of(service.service, address="h:1", now_s=64.0).clusters
    assert (one.got_version, one.got_ago_s, one.usual_norm) == (4, 40.0, None)
    status = status_of(service.service, address="h:1", now_s=64.0)
    assert status.late_s == 40.0
    assert status.waits_for == "layer 0 of a push of a, on its way to s0 for 35 s"
    service.service.leave(64.0, "s0", "it was killed")
    service.tell("a", asked, now_s=64.0)
    assert status_of(service.service, address="h:1", now_s=64.0).waits_for == "shard s0, which is away"


def pushes(service: ServiceMembers, now_s: float, *, tokens: int = 5) -> None:
    """Let a cluster push, and get the version with it, at one moment."""
    version = service.service.state.leading.version
    service.tell("s0", on.ShardBeat(shard="s0", versions=(version,)), now_s=now_s)
    service.tell("a", on.TrainingBegun(cluster="a"), now_s=now_s)
    service.tell("a", on.PushAsked(cluster="a", base_version=version, tokens=tokens), now_s=now_s)
    while commands := [(name, command) for name in ("a", "s0") for command in service.fetch(name)]:
        for name, command in commands:
            for event in answers(name, command):
                service.tell(name, event, now_s=now_s)


def answers(name: str, command: OuterCommand) -> list[OuterEvent]:
    """Answer as a shard and a cluster would whose norms are all 1."""
    squares = (1.0,) * len(WHOLE)
    match name, command:
        case "a", do.Move(way=TransferWay.PUSH, transfer=moving) if moving.layer == WHOLE[-1]:
            return [on.PushSent(cluster="a", push=moving.ticket)]
        case ("s0", do.Move(way=TransferWay.PUSH)) | ("a", do.Move(way=TransferWay.PULL)):
            return [on.Moved(way=command.way, transfer=command.transfer)]
        case _, do.CheckPush():
            return [on.PushChecked(shard="s0", push=command.push, complete=True)]
        case _, do.Measure():
            told = dict.fromkeys(command.pushes, squares)
            return [on.NormsMeasured(shard="s0", update=command.update, squares=told)]
        case _, do.Combine():
            return [on.MeanCombined(shard="s0", update=command.update, squares=squares)]
        case _, do.StageVersion():
            return [on.Staged(shard="s0", update=command.update)]
        case _, do.Commit():
            return [on.Committed(shard="s0", version=command.version, versions=(command.version,))]
    return []
