"""Clusters, master and shards over real sockets."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spantrain.core.outer.layers import group_layers
from spantrain.errors import UsageError
from spantrain.formats.registry import WireFormat
from spantrain.outer.client.optimizer import OuterOptimizer, OuterOptions
from spantrain.outer.client.parameters import spec_of
from spantrain.outer.local import LocalParameterServer
from spantrain.outer.master.config import MasterConfig
from spantrain.outer.master.server import MasterServer
from spantrain.outer.policy.settings import OuterSettings
from spantrain.outer.rules.nesterov import Nesterov
from spantrain.outer.shard.server import ShardServer, master_link
from spantrain.outer.shard.snapshots import FolderSnapshots
from testing.outer.clients import EXACT, alone, close, diloco, small_model, train_step, train_together
from testing.patience import PATIENCE_S, no_threads_left

AT_ONCE = OuterSettings(clip_norm=None, grace_s=0.0)


def config(*, rule: Nesterov = EXACT, settings: OuterSettings = AT_ONCE, **more: object) -> MasterConfig:
    return MasterConfig(shards=("s0", "s1"), rule=rule, settings=settings, **more)


@pytest.mark.parametrize("encrypted", [True, False])
def test_one_cluster_with_rate_1_and_no_momentum_is_local_training(encrypted):
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = OuterOptions(wait_for_start_s=PATIENCE_S, encrypted=encrypted)
    with (
        no_threads_left(),
        LocalParameterServer(config(encrypted=encrypted)) as server,
        OuterOptimizer(
            model.named_parameters(), master=server.address, token=server.token, cluster="a", inner_steps=3,
            options=options,
        ) as outer,
    ):  # fmt: skip
        for number in range(12):
            train_step(model, inner, number)
            outer.step(tokens=8)
        assert outer.finish(PATIENCE_S)
        close(dict(model.named_parameters()), alone(12))
        assert outer.metrics.version == server.status().version


def test_a_model_in_fragments_crosses_and_its_state_and_snapshots_outlive_all(tmp_path):
    """Two fragments, a stop of everything, and on from the newest version of each."""
    settings = replace(AT_ONCE, fragments=2)
    layers = {name: [name] for name, _ in small_model().named_parameters()}
    rounds = MasterConfig(shards=("s0", "s1"), rule=EXACT, settings=settings)
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for half in (range(8), range(8, 16)):
        with (
            no_threads_left(),
            LocalParameterServer(rounds, folder=tmp_path) as server,
            OuterOptimizer(
                model.named_parameters(), master=server.address, token=server.token, cluster="a", inner_steps=4,
                options=OuterOptions(wait_for_start_s=PATIENCE_S, layers=layers),
            ) as outer,
        ):  # fmt: skip
            for number in half:
                train_step(model, inner, number)
                outer.step(tokens=8)
            assert outer.finish(PATIENCE_S)
            close(dict(model.named_parameters()), alone(half.stop))
            status = server.status()
            assert status.clusters[0].tokens == 8 * half.stop
            assert [one.layers for one in status.fragments] == [2, 2]
            assert status.updates == sum(one.updates for one in status.fragments)
    with pytest.raises(UsageError, match="is of a model in 2 fragments, not in 1"):
        MasterServer(bind="127.0.0.1:0", state_dir=tmp_path / "master", config=config())


@pytest.mark.parametrize("wire_format", [WireFormat.BFLOAT16, WireFormat.INT4], ids=str)
def test_rounded_pushes_cross_in_the_bytes_that_they_are_said_to_take(wire_format, tmp_path):
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    layers = group_layers(spec_of(name, one) for name, one in model.named_parameters())
    whole, rounded = (
        sum(one.size_bytes for layer in layers for one in layer.sent_as(sent))
        for sent in (WireFormat.NATIVE, wire_format)
    )
    settings = replace(AT_ONCE, push_format=wire_format, compensation=0.1, ahead=0.0)
    with ExitStack() as stack:
        rounds = MasterConfig(shards=("s0", "s1"), rule=EXACT, settings=settings)
        master = stack.enter_context(MasterServer(bind="127.0.0.1:0", state_dir=tmp_path / "m", config=rounds))
        shards = [stack.enter_context(shard_of(name, master, tmp_path)) for name in ("s0", "s1")]
        outer = stack.enter_context(
            OuterOptimizer(
                model.named_parameters(), master=master.address, token=master.token, cluster="a", inner_steps=3,
                options=OuterOptions(wait_for_start_s=PATIENCE_S),
            )
        )  # fmt: skip
        for number in range(9):
            train_step(model, inner, number)
            outer.step(tokens=8)
        assert outer.finish(PATIENCE_S)
        pushes = outer.metrics.outer_rounds - 1
        assert pushes == 3
        assert sum(shard.counters().bytes_received["a"] for shard in shards) == whole + pushes * rounded
        close(dict(model.named_parameters()), alone(9), by=0.1)


@pytest.mark.parametrize(
    ("master", "token", "cluster", "told"),
    [
        ("nowhere", None, "a", "nowhere"),
        ("m:1", "st1abc", "a", "token is cut or mistyped"),
        ("m:1", None, "a b", "a b"),
    ],
)
def test_what_can_never_join_is_refused_at_once(master, token, cluster, told):
    with (
        LocalParameterServer(config()) as server,
        pytest.raises(UsageError, match=told),
        OuterOptimizer(small_model().named_parameters(), master=master, token=token or server.token, cluster=cluster),
    ):
        pass


def test_synchronous_clusters_are_diloco():
    rule, tokens, rounds = Nesterov(learning_rate=0.7, momentum=0.8), {"a": 8, "b": 16}, 3
    models = {"a": small_model(0), "b": small_model(1)}
    options = OuterOptions(wait_for_start_s=PATIENCE_S, wait_for_round_s=PATIENCE_S)
    endless = replace(AT_ONCE, grace_s=1e6, common_rounds=False, ahead=0.0)
    with LocalParameterServer(config(rule=rule, settings=endless)) as server, ExitStack() as stack:
        outers = {
            name: stack.enter_context(
                OuterOptimizer(
                    model.named_parameters(), master=server.address, token=server.token, cluster=name, inner_steps=2,
                    options=options,
                )
            )
            for name, model in models.items()
        }  # fmt: skip
        train_together(models, outers, tokens, steps=2 * rounds, round_s=0.4)
    for model in models.values():
        close(dict(model.named_parameters()), diloco(rounds, tokens), by=1e-6)


def parameters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def test_after_the_end_a_cluster_has_the_version_of_then_and_who_joins_later_the_newest(caplog):
    """And nobody is warned of anything in a run where nothing goes wrong."""
    with LocalParameterServer(config(rule=Nesterov(learning_rate=0.7, momentum=0.8))) as server:

        def run(cluster: str, steps: int) -> tuple[int, dict[str, torch.Tensor]]:
            model = small_model(ord(cluster))
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            with OuterOptimizer(
                model.named_parameters(), master=server.address, token=server.token, cluster=cluster, inner_steps=2,
                options=OuterOptions(wait_for_start_s=PATIENCE_S),
            ) as outer:  # fmt: skip
                for number in range(steps):
                    train_step(model, inner, number)
                    outer.step(tokens=8)
                assert not steps or outer.finish(PATIENCE_S)
                return outer.metrics.version, parameters_of(model)

        told = []
        for cluster, steps in (("a", 5), ("b", 6)):
            told.append(run(cluster, steps))
            version, parameters = run("r", 0)
            assert version == told[-1][0]
            assert all(torch.equal(parameters[name], one) for name, one in told[-1][1].items())
    assert told[0][0] < told[1][0]
    assert not [record.getMessage() for record in caplog.records if record.levelname != "INFO"]


@pytest.mark.parametrize("what", ["shard", "master"])
def test_what_died_and_came_back_has_all_that_was_learned(what, tmp_path):
    """Steps go on meanwhile; the shard has its snapshots, the master its state."""
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with ExitStack() as stack:
        bind = f"unix:{tmp_path}/master"
        master = stack.enter_context(MasterServer(bind=bind, state_dir=tmp_path / "m", config=config()))
        shards = {name: stack.enter_context(shard_of(name, master, tmp_path)) for name in ("s0", "s1")}
        outer = stack.enter_context(
            OuterOptimizer(
                model.named_parameters(), master=master.address, token=master.token, cluster="a", inner_steps=2,
                options=OuterOptions(wait_for_start_s=PATIENCE_S),
            )
        )  # fmt: skip
        for number in range(12):
            if number == 5:
                (shards["s1"] if what == "shard" else master).close()
            if number == 9 and what == "shard":
                stack.enter_context(shard_of("s1", master, tmp_path))
            if number == 9 and what == "master":
                stack.enter_context(MasterServer(bind=bind, state_dir=tmp_path / "m", config=config()))
            train_step(model, inner, number)
            outer.step(tokens=8)
        assert outer.finish(PATIENCE_S)
        close(dict(model.named_parameters()), alone(12))


def shard_of(name: str, master: MasterServer, folder: Path) -> ShardServer:
    return ShardServer(
        name=name, bind="tcp://127.0.0.1:0", snapshots=FolderSnapshots(folder / name),
        link_of=master_link(address=master.address, token=master.token, name=name),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "told", "wanted"),
    [
        (small_model(), "st1.wrong", "refused the token|not the master that made this token"),
        (torch.nn.Linear(3, 5), "", "not the model that is trained here: it lacks"),
    ],
    ids=["token", "model"],
)
def test_who_is_refused_for_good_does_not_train_alone(model, told, wanted, tmp_path):
    with ExitStack() as stack:
        stack.enter_context(no_threads_left())
        server = stack.enter_context(LocalParameterServer(config()))
        other = MasterServer(bind="127.0.0.1:0", state_dir=tmp_path / "other", config=config())
        known = OuterOptimizer(
            small_model().named_parameters(), master=server.address, token=server.token, cluster="a",
            options=OuterOptions(wait_for_start_s=PATIENCE_S),
        )  # fmt: skip
        stack.enter_context(known)
        with pytest.raises(UsageError, match=f"the master does not let cluster b in: .*({wanted})"):
            OuterOptimizer(
                model.named_parameters(), master=server.address, token=other.token if told else server.token,
                cluster="b", options=OuterOptions(wait_for_start_s=100 * PATIENCE_S),
            )  # fmt: skip
