"""A model in fragments: a training loop against a real master and real shards in one process."""

import threading

import pytest
import torch

from spantrain.core.outer import commands as do
from spantrain.core.outer.events import TransferWay
from spantrain.outer.policy.settings import OuterSettings
from spantrain.outer.rules.nesterov import Nesterov
from spantrain_studies.outer.plain import nesterov
from testing.outer.clients import EXACT, MadeUpServer, alone, close, small_model, train_step, train_together
from testing.patience import PATIENCE_S

EACH = {name: [name] for name, _ in small_model().named_parameters()}
"""A layer for each of its four parameters."""


def settings_of(fragments: int, **more) -> OuterSettings:
    return OuterSettings(**{"grace_s": 0.0, "clip_norm": None, "fragments": fragments, **more})


@pytest.mark.parametrize("ahead", [None, 0.0])
@pytest.mark.parametrize(("fragments", "shards"), [(2, 1), (2, 2), (3, 1), (4, 1)])
def test_one_cluster_with_rate_1_and_no_momentum_is_local_training(fragments, shards, ahead):
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with (
        MadeUpServer(rule=EXACT, shards=shards, settings=settings_of(fragments, ahead=ahead)) as server,
        server.optimizer(model.named_parameters(), "a", inner_steps=4, layers=EACH) as outer,
    ):
        for number in range(20):
            train_step(model, inner, number)
            outer.step(tokens=8)
        assert outer.finish(PATIENCE_S)
        close(dict(model.named_parameters()), alone(20))
        close(server.parameters, alone(20))
        state = server.master.state
        assert (outer.metrics.tokens, outer.metrics.inner_steps) == (160, 20)
        assert state.leading.clusters["a"].tokens == 160
        assert (
            outer.metrics.outer_rounds
            == sum(one.updates for one in state.fragments)
            == sum(one.version for one in state.fragments)
        )


def by_hand(steps: int, tokens: dict[str, int], rule: Nesterov, offsets: dict[str, int]) -> dict[str, torch.Tensor]:
    """Each parameter is a fragment of its own, and exchanged every four steps, from its offset on."""
    models = {name: small_model(0) for name in tokens}
    inner = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    shared = {name: one.detach().clone() for name, one in small_model(0).named_parameters()}
    speed = {name: torch.zeros_like(one) for name, one in shared.items()}
    whole = sum(tokens.values())
    for step in range(1, steps + 1):
        for name, model in models.items():
            train_step(model, inner[name], step - 1 + 100 * ord(name))
        for name in [name for name, offset in offsets.items() if step % 4 == offset]:
            ends = {one: dict(model.named_parameters())[name].detach() for one, model in models.items()}
            mean = sum(tokens[one] / whole * (shared[name] - end) for one, end in ends.items())
            shared[name], speed[name] = nesterov(shared[name], mean, speed[name], rule)
            for end in ends.values():
                end.copy_(shared[name])
    return shared


def test_synchronous_clusters_are_diloco_by_the_fragment():
    rule, tokens = Nesterov(learning_rate=0.7, momentum=0.8), {"a": 8, "b": 24}
    settings = settings_of(4, grace_s=1e6, common_rounds=False, ahead=0.0)
    models = {"a": small_model(0), "b": small_model(1)}
    with MadeUpServer(rule=rule, shards=1, settings=settings, clock=lambda: 0.0) as server:
        outers = {
            name: server.optimizer(model.named_parameters(), name, inner_steps=4, layers=EACH)
            for name, model in models.items()
        }
        server.begin(models)
        train_together(models, outers, tokens, steps=12)
        offsets = {name: k for k, name in enumerate(EACH)}
        close(server.parameters, by_hand(12, tokens, rule, offsets), by=1e-6)
        assert [one.version for one in server.master.state.fragments] == [4, 4, 4, 4]
        for outer in outers.values():
            outer.close()


@pytest.mark.parametrize("fault", ["cluster", "master", "shard"])
@pytest.mark.parametrize("phase", [do.StartPush, do.Move, do.AcceptPush, do.StageVersion, do.StartPull])
@pytest.mark.parametrize("struck", [0, 1])
def test_a_fault_in_an_exchange_of_one_fragment_loses_and_doubles_nothing(fault, phase, struck):
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with (
        MadeUpServer(settings=settings_of(2)) as server,
        server.optimizer(model.named_parameters(), "a", inner_steps=4, layers=EACH) as outer,
    ):
        left = [1]

        def strike(command) -> bool:
            if command.fragment != struck or not isinstance(command, phase) or left[0] == 0:
                return True
            left[0] -= 1
            if left[0]:
                return True
            if fault == "cluster":
                server.cut("a")
                server.post(lambda: server.mend("a"))
            elif fault == "master":
                server.post(server.restart_master)
            else:
                server.post(lambda: server.restart_shard("s1"))
            # What goes to one that has died is lost, and only that.
            return not (fault == "master" or (fault == "shard" and getattr(command, "shard", "") == "s1"))

        server.do(lambda: setattr(server, "hook", strike))
        for number in range(16):
            train_step(model, inner, number)
            outer.step(tokens=8)
        assert outer.finish(PATIENCE_S)
        assert left == [0]
        close(dict(model.named_parameters()), server.parameters, by=0.0)
        close(server.parameters, alone(16))
        assert server.master.state.leading.clusters["a"].tokens == 128


def test_a_push_that_is_lost_leaves_the_other_fragment_alone():
    """The first fragment's layers never arrive; the second's versions go on, and in the end both have all."""
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with (
        MadeUpServer(shards=1, settings=settings_of(2, ahead=0.0)) as server,
        server.optimizer(model.named_parameters(), "a", inner_steps=4, layers=EACH, wait_for_round_s=0.2) as outer,
    ):
        before = [one.version for one in server.master.state.fragments]

        def passes(command) -> bool:
            return not (command.fragment == 0 and isinstance(command, do.Move) and command.way is TransferWay.PUSH)

        server.do(lambda: setattr(server, "hook", passes))
        for number in range(16):
            train_step(model, inner, number)
            outer.step(tokens=8)
        after = [one.version for one in server.master.state.fragments]
        assert after[0] == before[0]
        assert after[1] > before[1]
        server.do(lambda: setattr(server, "hook", lambda command: True))
        server.do(server.restart_master)
        assert outer.finish(PATIENCE_S)
        close(server.parameters, alone(16))


def test_one_cluster_brings_the_first_parameters_of_all_fragments():
    models = {"a": small_model(0), "b": small_model(1)}
    with MadeUpServer(settings=settings_of(2)) as server:
        asked = threading.Event()
        server.hook = lambda command: asked.wait(PATIENCE_S)
        outers = {
            name: server.optimizer(model.named_parameters(), name, layers=EACH, wait_for_start_s=0.01)
            for name, model in models.items()
        }
        asked.set()
        for outer in outers.values():
            assert outer.finish(PATIENCE_S)
        close(server.parameters, dict(models["a"].named_parameters()), by=0.0)
        close(server.parameters, dict(models["b"].named_parameters()), by=0.0)
        one = small_model(0), small_model(1)
        assert any(
            all(torch.equal(server.parameters[name], tensor) for name, tensor in whole.named_parameters())
            for whole in one
        )
        for outer in outers.values():
            outer.close()
