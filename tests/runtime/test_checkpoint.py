"""Checkpoints: what was saved comes back, and damage is noticed."""

import pytest
import torch

from spantrain.core.job import TrainJob
from spantrain.core.spans import Span
from spantrain.errors import ConfigError
from spantrain.runtime.checkpoint import (
    Manifest,
    finish_checkpoint,
    latest_checkpoint,
    read_manifest,
    read_stage,
    restore_stage,
    save_stage,
)
from spantrain.runtime.optimizer import build_optimizer, clip_factor, learning_rate


def model_of(seed: int, job: TrainJob):
    torch.manual_seed(seed)
    parameters = {"a.weight": torch.nn.Parameter(torch.randn(3, 2)), "b": torch.nn.Parameter(torch.randn(4))}
    return parameters, build_optimizer(job, parameters.values())


def train(parameters, optimizer, steps: int) -> None:
    for step in range(steps):
        for parameter in parameters.values():
            parameter.grad = torch.full_like(parameter, 0.1 * (step + 1))
        optimizer.step()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_training_goes_on_to_the_same_bits(tmp_path, optimizer):
    job = TrainJob(steps=4, optimizer=optimizer)
    whole, whole_optimizer = model_of(1, job)
    train(whole, whole_optimizer, 2)
    save_stage(tmp_path, "dev", whole, whole_optimizer)
    train(whole, whole_optimizer, 2)

    again, again_optimizer = model_of(2, job)
    restore_stage(read_stage(tmp_path, "dev"), again, again_optimizer)
    train(again, again_optimizer, 2)
    for name, parameter in whole.items():
        assert torch.equal(parameter, again[name]), name


def test_the_newest_complete_checkpoint_is_found_and_damage_is_named(tmp_path, make_plan, spec_of):
    plan = make_plan(spec_of("gpt2"), [0, 5], [[1]], [[Span(0, 4)]], "compact")
    job = TrainJob(steps=4)
    parameters, optimizer = model_of(1, job)
    name, digest = save_stage(tmp_path / "checkpoint" / "step-2", "s0r0", parameters, optimizer)
    manifest = Manifest(
        step=2, plan=plan, job=job, schedule="compact", profile="", losses=(2.0, 1.0), files={name: digest}
    )
    folder = finish_checkpoint(tmp_path, manifest)
    assert latest_checkpoint(tmp_path) == folder
    assert read_manifest(folder) == manifest
    (folder / name).write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="changed or damaged"):
        read_manifest(folder)


def test_a_run_without_a_checkpoint_says_so(tmp_path):
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        latest_checkpoint(tmp_path)


def test_learning_rates():
    job = TrainJob(steps=10, learning_rate=1.0, warmup_steps=4, lr_schedule="cosine", decay_steps=8)
    rates = [learning_rate(job, step) for step in range(10)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[6] == pytest.approx(0.5)
    assert rates[8:] == [0.0, 0.0]


def test_clipping():
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(2.0, 1.0) == pytest.approx(0.5)
    assert clip_factor(1e9, None) == 1.0
