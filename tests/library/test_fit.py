"""The library's ways in, with real workers: what they train is what plain torch trains."""

import functools
import importlib.util
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import spantrain
from spantrain.app.training.run_record import read_run_record
from spantrain.config.artefacts import read_plan, write_plan
from spantrain.core.plan import Replica, Stage
from spantrain.core.span import Span
from spantrain.errors import ConfigError, UsageError, WorkerError
from spantrain.library.callbacks import UserReporter
from spantrain.models.build import whole_model
from spantrain.models.data.choice import model_on_data, with_loss
from spantrain.models.sampler import Sampler
from testing.patience import PATIENCE_S
from testing.runtime.kills import kill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOLERANCE, HALF_TOLERANCE = 1e-4, 0.02
BATCH, STEPS, RATE, SEED = 12, 6, 0.02, 5
ADAMW = functools.partial(torch.optim.AdamW, lr=RATE, weight_decay=0.1)


@pytest.fixture
def mine(user_file, monkeypatch):
    """The user's file, imported."""
    found = importlib.util.spec_from_file_location("mine", user_file)
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, "mine", module)
    found.loader.exec_module(module)
    return module


def arguments(out: Path, **given) -> spantrain.TrainingArguments:
    common = {
        "max_steps": STEPS, "train_batch_size": BATCH, "lr_scheduler_type": "constant", "seed": SEED,
        "max_grad_norm": 0.0, "logging_steps": 0, "save_steps": 4, "output_dir": out,
    }  # fmt: skip
    return spantrain.TrainingArguments(**{**common, **given})


def plain_torch(mine, batches) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train in this process, from the weights that workers begin with."""
    spec = with_loss(model_on_data(f"{mine.__file__}:build"), f"{mine.__file__}:loss")
    model = whole_model(spec, seed=SEED).module
    optimizer = ADAMW(model.parameters())
    losses = []
    for inputs, labels in batches:
        optimizer.zero_grad()
        loss = mine.loss(model(inputs), labels).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def sampled(data) -> list[tuple[torch.Tensor, torch.Tensor]]:
    sampler = Sampler(dataset_size=len(data), global_batch=BATCH, seed=SEED)
    steps = [[data[index] for index in sampler.indices(step, Span(0, BATCH))] for step in range(STEPS)]
    return [tuple(torch.stack(column) for column in zip(*rows, strict=True)) for rows in steps]


def check_weights(found, wanted, tolerance=TOLERANCE) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance)


class Told(spantrain.Callback):
    """Writes down what it hears."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.steps, self.folders, self.ended, self.began = [], [], None, 0
        self.stop_at = stop_at

    def on_train_begin(self, args, state, control, **kwargs):
        self.began += 1

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(state.last)
        control.should_training_stop = state.global_step == self.stop_at

    def on_save(self, args, state, control, **kwargs):
        self.folders.append(Path(state.checkpoint).name)

    def on_train_end(self, args, state, control, **kwargs):
        self.ended = state.log_history[-1]


def test_fit_on_a_functions_data_resumed(mine, tmp_path):
    told = Told()
    out = tmp_path / "run"
    given = {"measure": False, "callbacks": [told], "optimizer": ADAMW}
    trainer = spantrain.Trainer(mine.build, mine.loss, mine.samples, args=arguments(out, max_steps=4), **given)
    first = trainer.fit()
    again = spantrain.Trainer(mine.build, mine.loss, mine.samples, args=arguments(out, eval_steps=0), **given)
    outcome = again.train(resume_from_checkpoint=True)
    losses, weights = plain_torch(mine, sampled(mine.samples()))
    assert outcome.losses == pytest.approx(losses, rel=TOLERANCE)
    assert first.losses == outcome.losses[:4]
    check_weights(again.state_dict(), weights)
    assert [report.step for report in told.steps] == [1, 2, 3, 4, 5, 6]
    assert [report.loss for report in told.steps] == list(outcome.losses)
    assert (told.folders, told.began) == (["step-4", "step-6"], 2)
    assert told.ended["train_loss"] == outcome.training_loss == pytest.approx(sum(outcome.losses[4:]) / 2)
    assert (outcome.global_step, outcome.metrics["epoch"]) == (6, 1.5)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines if line["event"] == "step"] == list(outcome.losses)
    assert read_run_record(out).losses == outcome.losses


def test_fit_on_data_in_this_process(mine, tmp_path):
    """Samples are sent to the devices that read them; a callback may end training, with a checkpoint.

    In float16, whose losses are near those of float32.
    """
    told = Told(stop_at=3)
    trainer = spantrain.Trainer(
        mine.build,
        mine.loss,
        mine.Samples(48),
        ADAMW,
        args=arguments(tmp_path / "run", fp16=True),
        measure=False,
        callbacks=[told],
    )
    outcome = trainer.fit()
    losses, weights = plain_torch(mine, sampled(mine.Samples(48))[: len(outcome.losses)])
    assert 3 <= len(outcome.losses) < STEPS
    assert outcome.losses == pytest.approx(losses, rel=HALF_TOLERANCE)
    assert not any(report.skipped for report in told.steps)
    check_weights(trainer.state_dict(), weights, HALF_TOLERANCE)
    assert told.folders[-1] == f"step-{len(losses)}"


def test_a_loop_whose_steps_are_all_done_keeps_what_it_has_trained(mine, tmp_path):
    """However long it takes to ask for it; a batch more is refused by name."""
    batches = sampled(mine.Samples(48))[:2]
    with spantrain.session(
        mine.build, mine.loss, ADAMW, args=arguments(tmp_path / "run", max_steps=2), measure=False
    ) as session:
        for batch in batches:
            session.step(batch)
        session._loop._thread.join()  # the devices are done
        with pytest.raises(UsageError, match=r"all 2 steps \(max_steps\) of this session are done: end the loop there"):
            session.step(batches[0])
        check_weights(session.state_dict(), plain_torch(mine, batches)[1])
        assert session.save() == tmp_path / "run/checkpoint/step-2"


def test_in_float16_a_step_whose_forward_pass_overflows_is_skipped_and_in_float32_it_ends_the_run(mine, tmp_path):
    """As `GradScaler` does; the steps behind it train as if it had not been, and a run goes on from there."""
    batches = sampled(mine.Samples(48))[:4]
    over = (batches[1][0] * torch.inf, batches[1][1])
    losses, weights = plain_torch(mine, [batches[0], *batches[2:]])

    def trained(out: Path, **precision: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        given = arguments(out, max_steps=-1, **precision)
        with spantrain.session(mine.build, mine.loss, ADAMW, args=given, measure=False) as session:
            found = [session.step(batch) for batch in (batches[0], over, *batches[2:])]
            session.save()
            return found, session.state_dict()

    found, state = trained(tmp_path / "half", fp16=True)
    assert not math.isfinite(found.pop(1))
    assert found == pytest.approx(losses, rel=HALF_TOLERANCE)
    check_weights(state, weights, HALF_TOLERANCE)
    kept = read_run_record(tmp_path / "half").losses
    assert (kept[0], kept[1], len(kept)) == (found[0], None, 4)
    again = arguments(tmp_path / "half", max_steps=-1, fp16=True, resume_from_checkpoint=True)
    with spantrain.session(mine.build, mine.loss, ADAMW, args=again, measure=False) as session:
        assert session.step(over) != found[0]
        check_weights(session.state_dict(), state)
    with pytest.raises(WorkerError, match=r"step 1: .*; training has diverged"):
        trained(tmp_path / "whole")


class OutOfPatience(Exception):
    """What a user's loop may raise."""


def test_a_loop_of_ones_own(mine, tmp_path):
    """An exception in the loop ends the run; nothing was lost until then."""
    batches, sessions, found, states = sampled(mine.Samples(48)), [], [], []

    def loop() -> None:
        with spantrain.session(
            mine.build, mine.loss, ADAMW, args=arguments(tmp_path / "run", max_steps=-1), measure=False
        ) as session:
            sessions.append(session)
            found.extend(session.step(batch) for batch in batches[:2])
            states.append(session.state_dict())
            found.extend(session.step(batch) for batch in batches[2:])
            with pytest.raises(
                ConfigError, match="step 6: the batch has 3 samples, and each step takes 12: DataLoader"
            ):
                session.step((torch.zeros(3, 8), torch.zeros(3)))
            states.append(session.state_dict())
            raise OutOfPatience

    with pytest.raises(OutOfPatience):
        loop()
    losses, weights = plain_torch(mine, batches)
    assert found == pytest.approx(losses, rel=TOLERANCE)
    check_weights(states[0], plain_torch(mine, batches[:2])[1])
    check_weights(states[1], weights)
    with pytest.raises(UsageError, match="has ended"):
        sessions[0].step(batches[0])


class Kills(spantrain.Callback):
    """Kills the only device of the first stage behind the second step."""

    def __init__(self) -> None:
        self.changes = []

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            kill(Path(args.output_dir) / "logs" / "lab-0.log")

    def on_plan_change(self, args, state, control, plan, reason, **kwargs):
        self.changes.append((plan.devices, reason))

    def check(self) -> None:
        ((devices, reason),) = self.changes
        assert devices == ("office-nx",)
        assert reason.startswith("lab-0 lost (its worker was killed by signal 9): step ")


@pytest.fixture
def in_two(mine, tmp_path):
    """A plan's file of two stages on one device each."""

    def write(data: object) -> Path:
        out = tmp_path / "planned"
        trainer = spantrain.Trainer(
            mine.build, mine.loss, data, args=arguments(out), measure=False, cluster="laptop", optimizer=ADAMW
        )
        request = trainer._setting.ready(STEPS, UserReporter((), arguments(out), stop=list, save=list))
        plan, path = request.plan, out / "plan.json"
        halves = (Span(0, BATCH // 2), Span(BATCH // 2, BATCH))
        stages = tuple(
            Stage(
                first_unit=first, end_unit=end, micro_batches=halves,
                replicas=(Replica(devices=(name,), sample_share=1.0, in_flight_limit=BATCH),),
            )
            for first, end, name in ((0, 2, "lab-0"), (2, plan.stages[-1].end_unit, "office-nx"))
        )  # fmt: skip
        write_plan(replace(read_plan(path), stages=stages, hints=None, schedule="1f1b"), path)
        return path

    return write


def test_a_lost_worker_costs_the_trainer_a_step(mine, in_two, tmp_path):
    kills = Kills()
    trainer = spantrain.Trainer(
        mine.build, mine.loss, mine.samples, args=arguments(tmp_path / "run", protect="one"), measure=False,
        callbacks=[kills], optimizer=ADAMW, plan=in_two(mine.samples),
    )  # fmt: skip
    outcome = trainer.train()
    losses, weights = plain_torch(mine, sampled(mine.samples()))
    assert outcome.losses == pytest.approx(losses, rel=TOLERANCE)
    check_weights(trainer.state_dict(), weights)
    kills.check()


def test_a_lost_worker_costs_a_loop_of_ones_own_a_step(mine, in_two, tmp_path):
    kills, batches = Kills(), sampled(mine.Samples(48))
    with spantrain.session(
        mine.build, mine.loss, ADAMW, args=arguments(tmp_path / "run", max_steps=-1, protect="one"), measure=False,
        callbacks=[kills], plan=in_two(mine.Samples(48)),
    ) as session:  # fmt: skip
        found = [session.step(batch) for batch in batches]
        weights = session.state_dict()
    losses, wanted = plain_torch(mine, batches)
    assert found == pytest.approx(losses, rel=TOLERANCE)
    check_weights(weights, wanted)
    kills.check()


@pytest.mark.parametrize(("example", "says"), [("own_loop", "are read rightly"), ("hf_style", "held-out loss")])
def test_examples_run(example, says, tmp_path):
    file = Path(__file__).parents[2] / "examples" / f"{example}.py"
    ended = subprocess.run(
        [sys.executable, str(file)], cwd=tmp_path, capture_output=True, text=True, timeout=3 * PATIENCE_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert says in ended.stdout
