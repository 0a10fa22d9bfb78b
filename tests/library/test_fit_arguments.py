"""What users type into the trainer does what it does to plain PyTorch with transformers, also over a resume."""

import importlib.util
import sys

import pytest
import torch
import transformers
from transformers import get_scheduler

import spantrain
from spantrain.config.artefacts import read_plan
from spantrain.core.span import Span
from spantrain.models.build import whole_model
from spantrain.models.data.choice import model_on_data, with_loss
from spantrain.models.sampler import Sampler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, BATCH, RATE, SEED, DATA_SEED = 6, 12, 0.02, 5, 9


@pytest.fixture
def mine(user_file, monkeypatch):
    found = importlib.util.spec_from_file_location("mine", user_file)
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, "mine", module)
    found.loader.exec_module(module)
    return module


def plain(mine, make) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = whole_model(with_loss(model_on_data(f"{mine.__file__}:build"), f"{mine.__file__}:loss"), seed=SEED).module
    decays = transformers.Trainer.get_decay_parameter_names(None, model)
    named = dict(model.named_parameters())
    assert 0 < len(decays) < len(named)
    optimizer = make(
        [
            {"params": [named[name] for name in decays], "weight_decay": 0.1},
            {"params": [value for name, value in named.items() if name not in decays], "weight_decay": 0.0},
        ]
    )
    scheduler = get_scheduler("cosine_with_min_lr", optimizer, 2, STEPS, scheduler_specific_kwargs={"min_lr": 1e-3})
    data, losses = mine.samples(), []
    sampler = Sampler(dataset_size=len(data), global_batch=BATCH, seed=DATA_SEED)
    for step in range(STEPS):
        rows = [data[index] for index in sampler.indices(step, Span(0, BATCH))]
        inputs, labels = (torch.stack(column) for column in zip(*rows, strict=True))
        optimizer.zero_grad()
        loss = mine.loss(model(inputs), labels).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


@pytest.mark.parametrize(
    ("given", "make"),
    [
        ({"optim": "adafactor", "gradient_checkpointing": True}, lambda groups: torch.optim.Adafactor(groups, lr=RATE)),
        (
            {"optim": "rmsprop", "optim_args": "momentum=0.5, centered=true", "gradient_checkpointing": False},
            lambda groups: torch.optim.RMSprop(groups, lr=RATE, momentum=0.5, centered=True),
        ),
    ],
)
def test_the_same_as_plain_pytorch(given, make, mine, tmp_path):
    common = {
        "num_train_epochs": STEPS * BATCH / len(mine.samples()), "train_batch_size": BATCH, "learning_rate": RATE,
        "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-3}, "warmup_ratio": 0.33,
        "weight_decay": 0.1, "max_grad_norm": 0.5, "seed": SEED, "data_seed": DATA_SEED, "save_strategy": "steps",
        "save_steps": 2, "logging_steps": 0, "output_dir": tmp_path / "run", **given,
    }  # fmt: skip

    def trainer(*callbacks, **more):
        args = spantrain.TrainingArguments(**(common | more))
        return spantrain.Trainer(
            mine.build, mine.loss, mine.samples, args=args, measure=False, callbacks=list(callbacks)
        )

    class Stops(spantrain.Callback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    assert len(trainer(Stops()).fit().losses) < STEPS
    resumed = trainer(resume_from_checkpoint=True)
    outcome = resumed.fit()
    losses, weights = plain(mine, make)
    assert outcome.losses == pytest.approx(losses, rel=1e-4)
    for name, tensor in resumed.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-4, atol=1e-5)
    plan = read_plan(tmp_path / "run" / "plan.json")
    wanted = "all" if given["gradient_checkpointing"] else "none"
    again = {"all" if stage.recompute == tuple(stage.units) else "none" for stage in plan.stages}
    assert again == {wanted}
