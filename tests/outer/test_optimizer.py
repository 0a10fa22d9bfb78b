"""A training loop with the outer optimizer, against a real master and real shards in one process."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from spantrain.core.outer import commands as do
from spantrain.core.outer.events import TransferWay
from spantrain.errors import UsageError
from spantrain.outer.client.optimizer import OuterOptimizer
from spantrain.outer.policy.settings import OuterSettings
from spantrain.outer.rules.nesterov import Nesterov
from testing.outer.clients import EXACT, MadeUpServer, alone, close, diloco, small_model, train_step, train_together
from testing.patience import PATIENCE_S, no_threads_left

ENDLESS = OuterSettings(grace_s=1e6, clip_norm=None)


@pytest.mark.parametrize("ahead", [None, 0.5, 0.0])
def test_one_cluster_with_rate_1_and_no_momentum_is_local_training(ahead):
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings = OuterSettings(clip_norm=None, grace_s=0.0, ahead=ahead)
    with MadeUpServer(settings=settings) as server, server.optimizer(model.named_parameters(), "a") as outer:
        for number in range(20):
            train_step(model, inner, number)
            outer.step(tokens=8)
        assert outer.finish(PATIENCE_S)
        close(dict(model.named_parameters()), alone(20))
        close(server.parameters, alone(20))
        metrics = outer.metrics
        assert (metrics.tokens, metrics.inner_steps, metrics.skipped) == (160, 20, {})
        assert server.master.state.leading.clusters["a"].tokens == 160
        # The first push brought parameters.
        assert metrics.outer_rounds == server.master.state.leading.updates
        if ahead == 0:
            assert metrics.outer_rounds == 11
            assert metrics.mean_staleness == 0


def test_synchronous_clusters_are_diloco():
    """Two clusters, an endless window: torch's Nesterov step on the mean by tokens of what both learned."""
    rule, tokens, rounds = Nesterov(learning_rate=0.7, momentum=0.8), {"a": 8, "b": 24}, 4
    settings = replace(ENDLESS, common_rounds=False, ahead=0.0)
    server = MadeUpServer(rule=rule, settings=settings, clock=lambda: 0.0)
    models = {"a": small_model(0), "b": small_model(1)}
    outers = {name: server.optimizer(model.named_parameters(), name) for name, model in models.items()}
    server.begin(models)
    train_together(models, outers, tokens, steps=2 * rounds)
    wanted = diloco(rounds, tokens)
    for name, model in models.items():
        close(dict(model.named_parameters()), wanted, by=1e-6)
        assert outers[name].metrics.outer_rounds == rounds + (name == "a")
        outers[name].close()
    close(server.parameters, wanted, by=1e-6)
    server.close()


def test_a_cluster_hears_that_what_it_pushed_was_left_out(caplog):
    """It counted such a push as a round, and said nothing."""
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = OuterSettings(clip_norm=None, grace_s=0.0, ahead=0.0)
    with MadeUpServer(settings=settings) as server, server.optimizer(model.named_parameters(), "a") as outer:
        for number in range(8):
            train_step(model, inner, number)
            if number >= 4:
                with torch.no_grad():
                    next(iter(model.parameters())).view(-1)[0] = torch.nan
            outer.step(tokens=8)
        assert outer.finish(PATIENCE_S)
        metrics, record = outer.metrics, server.master.state.leading.clusters["a"]
        assert record.left_out == 2
        assert metrics.outer_rounds == record.pushes - 2
        assert list(metrics.skipped.values()) == [2]
        assert all(one.isfinite().all() for one in model.parameters())
    assert [one for one in caplog.messages if "cluster a: a push was left out of an update: it was not finite" in one]


def test_a_second_cluster_begins_from_what_the_first_has_made():
    first, second = small_model(0), small_model(1)
    with MadeUpServer() as server, server.optimizer(first.named_parameters(), "a") as one:
        inner = torch.optim.SGD(first.parameters(), lr=0.1)
        for number in range(4):
            train_step(first, inner, number)
            one.step()
        assert one.finish(PATIENCE_S)
        with server.optimizer(second.named_parameters(), "b") as other:
            assert other.metrics.version == one.metrics.version
            close(dict(second.named_parameters()), dict(first.named_parameters()), by=0.0)


def test_a_cluster_without_a_master_trains_alone_and_joins_later():
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with MadeUpServer() as server:
        server.away.add("a")
        with server.optimizer(model.named_parameters(), "a", wait_for_start_s=0.01) as outer:
            for number in range(5):
                train_step(model, inner, number)
                outer.step()
            close(dict(model.named_parameters()), alone(5), by=0.0)
            assert not outer.finish(0.01)
            server.do(lambda: server.mend("a"))
            assert outer.finish(PATIENCE_S)
            close(server.parameters, alone(5))


PHASES = (
    do.Welcome, do.StartPush, (do.Move, TransferWay.PUSH), do.CheckPush, do.AcceptPush, do.Measure, do.Combine,
    do.StageVersion, do.Commit, do.StartPull, (do.Move, TransferWay.PULL),
)  # fmt: skip


@pytest.mark.parametrize("fault", ["cluster", "master", "shard"])
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: getattr(phase, "__name__", None) or f"Move{phase[1].value}")
@pytest.mark.parametrize("ahead", [None, 0.0])
def test_a_fault_in_any_phase_loses_and_doubles_nothing(fault, phase, ahead):
    """In the third round, say: training goes on, and in the end the shards have what one cluster alone has.

    Also where clusters stand still behind a push: they do not for one that comes to nothing.
    """
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings = OuterSettings(clip_norm=None, grace_s=0.0, ahead=ahead)
    with MadeUpServer(settings=settings) as server, server.optimizer(model.named_parameters(), "a") as outer:
        armed = Fault(server, fault, phase)
        server.do(lambda: setattr(server, "hook", armed))
        for number in range(12):
            train_step(model, inner, number)
            outer.step(tokens=8)
        outer.finish(0.3)
        server.do(armed.mend)
        assert outer.finish(PATIENCE_S)
        close(dict(model.named_parameters()), server.parameters, by=0.0)
        if not (fault == "shard" and phase is do.Commit):
            # A version that was decided, and that a shard lost before it served it, is lost with what is in it.
            close(server.parameters, alone(12))
            assert server.master.state.leading.clusters["a"].tokens == 96


class Fault:
    """Strikes once, when a command of a phase is on its way in the second round, to the second shard."""

    def __init__(self, server: MadeUpServer, what: str, phase: Any) -> None:
        self.server, self.what, self.phase = server, what, phase
        to_shards = phase in (do.CheckPush, do.Measure, do.StageVersion, do.Commit)
        self.left = 1 if phase is do.Welcome else 4 if to_shards else 2

    def __call__(self, command: Any) -> bool:
        kind, way = self.phase if isinstance(self.phase, tuple) else (self.phase, None)
        if not isinstance(command, kind) or (way and command.way is not way):
            return True
        self.left -= 1
        if self.left:
            return True
        self.strike()
        # What goes to one that has died is lost, and only that.
        return not (self.what == "master" or (self.what == "shard" and getattr(command, "shard", "") == "s1"))

    def strike(self) -> None:
        if self.what == "cluster":
            self.server.cut("a")
        elif self.what == "shard":
            self.server.post(lambda: self.server.restart_shard("s1"))
        else:
            self.server.post(self.server.restart_master)

    def mend(self) -> None:
        if "a" in self.server.away:
            self.server.mend("a")


def test_what_makes_no_sense_is_refused_by_name():
    with MadeUpServer() as server:
        with pytest.raises(UsageError, match="inner_steps must be at least 1, got 0"):
            server.optimizer(small_model().named_parameters(), "a", inner_steps=0)
        with pytest.raises(UsageError, match="needs parameters, got none"):
            server.optimizer({}, "a")
        with pytest.raises(UsageError, match="1 is the same as 0"):
            server.optimizer(dict.fromkeys("01", torch.zeros(2)), "a")
        with pytest.raises(UsageError, match=r"dtype must be one of .* got int64"):
            server.optimizer({"0": torch.zeros(2, dtype=torch.int64)}, "a")
        outer = server.optimizer(small_model().named_parameters(), "a")
        with pytest.raises(UsageError, match="must not be negative, got -1"):
            outer.step(tokens=-1)
        outer.close()
        with pytest.raises(UsageError, match="was closed"):
            outer.step()


def test_a_command_of_outer_run_says_where_to_join():
    with pytest.raises(UsageError, match=r"SPANTRAIN_OUTER_TOKEN is not set; .*INNER_STEPS is '0'"):
        OuterOptimizer.from_environment(
            small_model().named_parameters(),
            variables={
                "SPANTRAIN_OUTER_MASTER": "m:1", "SPANTRAIN_OUTER_CLUSTER": "a", "SPANTRAIN_OUTER_INNER_STEPS": "0",
            },
        )  # fmt: skip


def test_nothing_is_left_behind():
    with (
        no_threads_left(),
        MadeUpServer(rule=EXACT) as server,
        server.optimizer(small_model().named_parameters(), "a") as outer,
    ):
        outer.step()
