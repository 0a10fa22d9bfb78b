"""The callback for transformers' Trainer, called as that calls it (the Trainer itself needs accelerate)."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import spantrain
from testing.outer.clients import MadeUpServer, alone, close, small_model, train_step
from testing.patience import PATIENCE_S


def test_a_trainer_takes_part_by_one_callback():
    model = small_model()
    model.register_parameter("frozen", torch.nn.Parameter(torch.ones(3), requires_grad=False))
    inner = torch.optim.SGD((one for one in model.parameters() if one.requires_grad), lr=0.1, momentum=0.9)
    arguments: Any = SimpleNamespace(world_size=1, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    state: Any = SimpleNamespace(num_input_tokens_seen=0)
    with MadeUpServer() as server:
        callback = spantrain.OuterTrainerCallback(
            lambda parameters: server.optimizer(parameters, "a"), finish_s=PATIENCE_S
        )
        callback.on_step_end(arguments, state, None)
        callback.on_train_begin(arguments, state, None, model=model, optimizer=inner)
        for number in range(6):
            train_step(model, inner, number)
            # For half of the steps the trainer counts tokens.
            state.num_input_tokens_seen += 100 if number >= 3 else 0
            callback.on_step_end(arguments, state, None)
        callback.on_train_end(arguments, state, None)
        assert callback.metrics.tokens == 3 * 8 + 3 * 100
        assert server.master.state.leading.clusters["a"].tokens == 324
        close(server.parameters, alone(6))


@pytest.mark.parametrize("name", ["OuterOptimizer", "Trainer", "session"])
def test_loaders_may_fork_beside_a_connection(name, monkeypatch):
    """gRPC's own handlers of fork() would end a DataLoader's workers."""
    monkeypatch.delenv("GRPC_ENABLE_FORK_SUPPORT", raising=False)
    assert getattr(spantrain, name).__name__ == name
    assert os.environ["GRPC_ENABLE_FORK_SUPPORT"] == "false"
