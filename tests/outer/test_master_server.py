"""A real master on a real connection: rounds, restarts, strangers, and what it refuses."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from made_up_links import LAYERS, WHOLE, Hall, LinkedCluster, LinkedShard, cluster_facts, shard_facts
from made_up_outer import layers_of
from patience import PATIENCE_S
from spantrain.core import outer_events as on
from spantrain.core.outer_events import Ticket, Transfer, Way
from spantrain.errors import ProtocolError, UsageError
from spantrain.outer.codec import encode_event, encode_value
from spantrain.outer.link import ask_status
from spantrain.outer.master_config import MasterConfig
from spantrain.outer.master_files import token_file
from spantrain.outer.master_server import MasterServer
from spantrain.policy.outer.settings import OuterSettings
from spantrain.transport.control.client import ControlClient
from spantrain.transport.control.protocol import RemoteRefusal

SETTINGS = OuterSettings(grace_s=0.01, lost_after_s=30.0, clip_norm=None)
CONFIG = MasterConfig(
    shards=("s0", "s1"), settings=SETTINGS, samples=1200, chunks=400, passes=1, encrypted=False, max_members=8
)


class Run:
    """A master and its members, all ended together."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self.stack = stack
        self.hall = Hall()
        self.master: MasterServer

    def start_master(self, config: MasterConfig = CONFIG) -> MasterServer:
        self.master = MasterServer(bind=f"unix:{self.folder}/master", state_dir=self.folder / "state", config=config)
        self.stack.callback(self.master.close)
        self.master.start()
        return self.master

    def shard(self, name: str, before: LinkedShard | None = None) -> LinkedShard:
        shard = LinkedShard(self.hall, name, before.memory if before else None)
        shard.connect(self.master.address, self.master.token, shard_facts())
        self.stack.callback(shard.link.close)
        return shard

    def cluster(self, name: str) -> LinkedCluster:
        cluster = LinkedCluster(self.hall, name)
        cluster.connect(self.master.address, self.master.token, cluster_facts())
        self.stack.callback(cluster.link.close)
        return cluster

    def client(self, name: str) -> ControlClient:
        client = ControlClient.join(self.master.address, self.master.token, name=name, facts={}, timeout_s=PATIENCE_S)
        self.stack.callback(client.close)
        return client

    def until(self, holds: Callable[[], bool], what: str) -> None:
        with self.hall.changed:
            end_s = time.monotonic() + PATIENCE_S
            while not holds():
                assert time.monotonic() < end_s, f"never came true: {what}; {self.told()}"
                self.hall.changed.wait(0.05)

    def told(self) -> str:
        clusters = {
            name: (one.link.problem, one.link.dropped, one.cluster.client.__dict__, one.early, one.cluster.__dict__)
            for name, one in self.hall.clusters.items()
        }
        return f"{clusters}; {self.master.status()}"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    before = set(threading.enumerate())
    with contextlib.ExitStack() as stack:
        yield Run(tmp_path, stack)
    left = [one for one in set(threading.enumerate()) - before if one.name.startswith(("outer", "control"))]
    assert not left
    assert not list(tmp_path.glob("master*"))


def train_a_little(run: Run, cluster: LinkedCluster) -> None:
    """Let a cluster learn from a sample, and push, as often as it needs until that is in a version."""
    before = tokens_of(run, cluster)
    run.until(lambda: tokens_of(run, cluster) > before or _train(cluster), "its tokens count")


def tokens_of(run: Run, cluster: LinkedCluster) -> int:
    return {one.name: one.tokens for one in run.master.status().clusters}.get(cluster.name, 0)


def _train(cluster: LinkedCluster) -> bool:
    if cluster.link.problem is None:
        if not cluster.cluster.learned:
            cluster.act(lambda made: made.train())
        cluster.act(lambda made: made.ask())
    return False


def seeded(run: Run, *names: str) -> list[LinkedCluster]:
    run.shard("s0")
    run.shard("s1")
    clusters = [run.cluster(name) for name in names]
    run.until(lambda: run.master.status().seeded or _train(clusters[0]), "first parameters")
    run.until(lambda: all(one.cluster.base > 0 for one in clusters), "everybody has them")
    return clusters


def test_rounds_over_real_connections(run: Run) -> None:
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
    assert status.to_plain()["clusters"][0]["name"] == "a"
    run.until(lambda: run.master.status().shards[0].heard_ago_s is not None, "the observer left nothing")


def test_shards_that_come_before_any_cluster_are_told_the_layout(run: Run) -> None:
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
    assert [one.state for one in run.master.status().shards] == ["ready", "away"] or True


def test_a_master_that_starts_again_goes_on_with_everybody(run: Run) -> None:
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


def test_a_shard_that_was_started_again_is_dialled_at_its_new_place(run: Run) -> None:
    run.start_master()
    (a,) = seeded(run, "a")
    before = run.hall.shards["s1"]
    before.link.close()
    run.until(lambda: run.master.status().shards[1].state == "away", "its leaving is seen")
    run.shard("s1", before)
    train_a_little(run, a)
    assert len(a.peers) == 2


def test_a_name_is_taken_over_by_who_joins_with_it_last(run: Run) -> None:
    run.start_master()
    first = run.client("a")
    number = first.call("enter", {"facts": encode_value(cluster_facts())}, timeout_s=PATIENCE_S)["connection"]
    second = run.client("a")
    with pytest.raises(RemoteRefusal, match="not a member of this run any more"):
        first.call("tell", {"connection": number, "batch": 1, "events": []}, timeout_s=PATIENCE_S)
    with pytest.raises(RemoteRefusal, match=f"connection {number + 1} of a has ended"):
        second.call("tell", {"connection": number + 1, "batch": 1, "events": []}, timeout_s=PATIENCE_S)
    entered = second.call("enter", {"facts": encode_value(cluster_facts())}, timeout_s=PATIENCE_S)
    assert entered["connection"] == number + 1


def test_a_wrong_token_is_refused_and_said(run: Run, tmp_path_factory: pytest.TempPathFactory) -> None:
    master = run.start_master()
    with MasterServer(
        bind=f"unix:{run.folder}/master-2", state_dir=tmp_path_factory.mktemp("other"), config=CONFIG
    ) as other:
        shard = LinkedShard(run.hall, "s0")
        shard.connect(master.address, other.token, shard_facts())
        run.stack.callback(shard.link.close)
        run.until(lambda: "not the coordinator that made this token" in (shard.link.problem or ""), "it is refused")
        with pytest.raises(UsageError, match="not the coordinator"):
            ask_status(master.address, other.token, timeout_s=PATIENCE_S)
    assert not shard.welcomes
    assert master.status().shards[0].state == "away"


def events_of_others() -> list[Any]:
    one = Transfer(ticket=Ticket(1, 1), cluster="a", worker="a", layer=0, shard="s0", size_bytes=4)
    return [
        on.PushAsked(cluster="a", base_version=0, tokens=9),
        on.ClusterRegistered(cluster="a", workers={"a": WHOLE}),
        on.ClusterRegistered(cluster="z", workers={"a": WHOLE}),
        on.ClusterLeft(cluster="a"),
        on.ShardLost(shard="s0", reason="I say so"),
        on.Committed(shard="s0", version=9, versions=(9,)),
        on.Moved(way=Way.PUSH, transfer=one),
        on.Moved(way=Way.PULL, transfer=one),
        on.TransferLost(way=Way.PULL, transfer=one, reason="I say so"),
        on.Ticked(),
    ]


def test_nobody_speaks_for_another(run: Run) -> None:
    run.start_master()
    (a,) = seeded(run, "a")
    stranger = run.client("z")
    number = stranger.call("enter", {"facts": encode_value(cluster_facts())}, timeout_s=PATIENCE_S)["connection"]
    told = events_of_others()
    answer = stranger.call(
        "tell", {"connection": number, "batch": 1, "events": [encode_event(event) for event in told]},
        timeout_s=PATIENCE_S,
    )  # fmt: skip
    assert len(answer["refused"]) == len(told)
    assert answer["refused"][0] == "z, a cluster, cannot say PushAsked: only a can"
    assert "the workers of z are named z or z/..., not a" in answer["refused"][2]
    assert run.master.status().refusals == {"foreign": len(told)}
    train_a_little(run, a)


def test_what_makes_no_sense_is_refused_and_counted(run: Run) -> None:
    run.start_master()
    client = run.client("a")
    number = client.call("enter", {"facts": encode_value(cluster_facts())}, timeout_s=PATIENCE_S)["connection"]
    head = {"connection": number, "batch": 1}
    beat = encode_event(on.ClusterBeat(cluster="a"))
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
def test_who_cannot_be_let_in(run: Run, name: str, facts: Any, message: str) -> None:
    run.start_master()
    with pytest.raises(RemoteRefusal, match=message):
        run.client(name).call("enter", {"facts": encode_value(facts)}, timeout_s=PATIENCE_S)
    assert run.master.status().refusals == {"not_let_in": 1}


def test_another_model_is_refused_with_its_differences(run: Run) -> None:
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


def test_a_folder_is_for_one_master_of_one_model_and_data(run: Run) -> None:
    master = run.start_master()
    with pytest.raises(UsageError, match="another master runs with this folder"):
        MasterServer(bind="127.0.0.1:0", state_dir=run.folder / "state", config=CONFIG)
    seeded(run, "a")
    master.close()
    with pytest.raises(UsageError, match="divided over s0, s1, not over s0"):
        MasterServer(bind="127.0.0.1:0", state_dir=run.folder / "state", config=replace(CONFIG, shards=("s0",)))
    with pytest.raises(UsageError, match="is of data of 1200 samples in 400 chunks, not of 1200 in 3"):
        MasterServer(bind="127.0.0.1:0", state_dir=run.folder / "state", config=replace(CONFIG, chunks=3))
    (run.folder / "state" / "state.json").write_text('{"version": "x"}')
    with pytest.raises(UsageError, match=r"state\.json.*version"):
        MasterServer(bind="127.0.0.1:0", state_dir=run.folder / "state", config=CONFIG)
    (run.folder / "state" / "credentials.json").chmod(0o644)
    with pytest.raises(UsageError, match="others may read it"):
        MasterServer(bind="127.0.0.1:0", state_dir=run.folder / "state", config=CONFIG)


def test_secrets_are_for_their_owner_alone(run: Run) -> None:
    run.start_master()
    seeded(run, "a")
    assert (run.folder / "state").stat().st_mode & 0o077 == 0
    modes = {path.name: path.stat().st_mode & 0o777 for path in (run.folder / "state").iterdir()}
    assert modes == dict.fromkeys(["credentials.json", "token", "layout.json", "state.json", "lock"], 0o600)


def test_a_link_that_is_closed_at_once_leaves_nothing(run: Run) -> None:
    run.start_master()
    for _ in range(3):
        shard = run.shard("s0")
        shard.link.tell(on.ShardLost(shard="s0", reason="never told"))
        shard.link.close()
        assert shard.link.dropped >= 1
    run.master.close()
    alone = LinkedShard(run.hall, "s1")
    alone.connect(run.master.address, run.master.token, shard_facts())
    alone.link.close()
    assert not alone.welcomes


@pytest.mark.slow
def test_a_master_that_is_killed_loses_nothing_that_it_decided(run: Run) -> None:
    """Its process is killed at moments that nobody chose; those that live on go on with the next."""
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from spantrain.outer.master_config import MasterConfig\n"
        "from spantrain.outer.master_server import MasterServer\n"
        "from spantrain.policy.outer.settings import OuterSettings\n"
        "settings = OuterSettings(grace_s=0.01, lost_after_s=30.0, clip_norm=None)\n"
        "config = MasterConfig(shards=('s0', 's1'), settings=settings, samples=1200, chunks=400, passes=1,"
        " encrypted=False, max_members=8)\n"
        "master = MasterServer(bind=sys.argv[1], state_dir=Path(sys.argv[2]), config=config)\n"
        "master.start()\nprint(master.token, flush=True)\nmaster.wait()\n"
    )
    address = f"unix:{run.folder}/master"
    processes: list[subprocess.Popen[str]] = []

    def start() -> str:
        process = subprocess.Popen(
            [sys.executable, "-c", code, address, str(run.folder / "state")], stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        run.stack.callback(_end, process)
        assert process.stdout
        return process.stdout.readline().strip()

    token = start()
    hall = run.hall
    members: list[Any] = [
        LinkedShard(hall, "s0"),
        LinkedShard(hall, "s1"),
        LinkedCluster(hall, "a"),
        LinkedCluster(hall, "b"),
    ]
    for one in members:
        one.connect(address, token, cluster_facts() if isinstance(one, LinkedCluster) else shard_facts())
        run.stack.callback(one.link.close)
    clusters = [one for one in members if isinstance(one, LinkedCluster)]
    versions = [0]
    for turn in range(3):
        end_s = time.monotonic() + PATIENCE_S
        while (version := max(one.cluster.base for one in clusters)) < versions[-1] + 2:
            assert time.monotonic() < end_s, (versions, [one.link.problem for one in members])
            for one in clusters:
                _train(one)
            time.sleep(0.01)
        versions.append(version)
        processes[-1].send_signal(signal.SIGKILL)
        processes[-1].wait(PATIENCE_S)
        if turn < 2:
            assert start() == token
    contents = {}
    for shard in hall.shards.values():
        for version, content in shard.memory.versions.items():
            assert contents.setdefault(version, content) == content
    os.unlink(f"{run.folder}/master")
    os.unlink(f"{run.folder}/master.control")


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait(PATIENCE_S)
    assert process.stdout
    process.stdout.close()
