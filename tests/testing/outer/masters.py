"""A real master on a real connection, with members that hold no numbers, all ended together."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spantrain.outer.master.config import MasterConfig
from spantrain.outer.master.server import MasterServer
from spantrain.outer.policy.settings import OuterSettings
from spantrain.transport.control.client import ControlClient
from testing.outer.links import Hall, LinkedCluster, LinkedShard, cluster_facts, shard_facts
from testing.patience import PATIENCE_S

SETTINGS = OuterSettings(grace_s=0.01, lost_after_s=30.0, clip_norm=None)
CONFIG = MasterConfig(
    shards=("s0", "s1"), settings=SETTINGS, samples=1200, chunks=400, passes=1, encrypted=False, max_members=8
)


class MasterRun:
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

    def client(self, name: str, brief: dict[str, Any] | None = None) -> ControlClient:
        client = ControlClient.join(
            self.master.address, self.master.token, name=name, facts=brief or {}, timeout_s=PATIENCE_S
        )
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
            name: (one.link.problem, one.cluster.client.__dict__, one.early, one.cluster.__dict__)
            for name, one in self.hall.clusters.items()
        }
        return f"{clusters}; {self.master.status()}"


def train_a_little(run: MasterRun, cluster: LinkedCluster) -> None:
    """Let a cluster learn from a sample, and push, as often as it needs until that is in a version."""
    before = tokens_of(run, cluster)
    run.until(lambda: tokens_of(run, cluster) > before or train(cluster), "its tokens count")


def tokens_of(run: MasterRun, cluster: LinkedCluster) -> int:
    return {one.name: one.tokens for one in run.master.status().clusters}.get(cluster.name, 0)


def train(cluster: LinkedCluster) -> bool:
    if cluster.link.problem is None:
        if not cluster.cluster.learned:
            cluster.act(lambda made: made.train())
        cluster.act(lambda made: made.ask())
    return False


def seeded(run: MasterRun, *names: str) -> list[LinkedCluster]:
    run.shard("s0")
    run.shard("s1")
    clusters = [run.cluster(name) for name in names]
    run.until(lambda: run.master.status().seeded or train(clusters[0]), "first parameters")
    run.until(lambda: all(one.cluster.base > 0 for one in clusters), "everybody has them")
    return clusters
