"""A fault that ends a thread: a shard ends with the reason, a cluster trains on and says that it is alone."""

import pytest
import torch

from spantrain.core.outer import commands as do
from spantrain.core.outer.events import Ticket
from spantrain.outer.client.optimizer import OuterOptimizer
from spantrain.outer.local import LocalParameterServer
from spantrain.outer.master.config import MasterConfig
from spantrain.outer.policy.settings import OuterSettings
from testing.outer.clients import EXACT
from testing.outer.rounds import random_tensors
from testing.outer.shards import LocalOuterRun

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def test_a_shard_one_of_whose_threads_has_ended_cannot_go_on(tmp_path):
    with LocalOuterRun(random_tensors(0), shards=1, clusters="a", folder=tmp_path) as local:
        local.until(lambda: "s0" in local.links)
        shard = local.shards["s0"]
        shard.commanded(
            do.Commit(shard="s0", update=Ticket(1, 1), version=9, keep=(), bases=(), reason="a test likes it so")
        )  # never staged
        local.until(lambda: shard.failure)
        assert shard.failure.startswith("the thread 'commands of s0' has ended: AssertionError")


def test_a_cluster_that_a_fault_cuts_off_says_so_and_trains_on(caplog):
    config = MasterConfig(shards=("s0",), rule=EXACT, settings=OuterSettings(clip_norm=None, grace_s=0.0))
    weight = torch.zeros(3, requires_grad=True)
    with (
        LocalParameterServer(config) as server,
        OuterOptimizer({"w": weight}, master=server.address, token=server.token, cluster="a", inner_steps=1) as outer,
    ):
        outer._session.died("the thread 'layers of a' has ended: LookupError: a fault")
        for _ in range(3):
            weight.data.add_(1.0)
            outer.step()
        assert not outer.finish(0.0)
        assert weight.tolist() == [3.0] * 3
    assert [record.levelname for record in caplog.records if "cluster a is cut off from all others" in record.message]
