"""Arguments by the names that people know; optimizers; functions that workers can import."""

import dataclasses
import functools
import math
import re
import subprocess
import sys

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import spantrain
from spantrain.app.session import SessionOptions
from spantrain.errors import ConfigError
from spantrain.library.arguments import ELSEWHERE
from spantrain.library.callbacks import checked_callbacks
from spantrain.library.setting import function_source, given_optimizer
from spantrain.runtime.gradients.optimizer import build_optimizer, learning_rate
from testing.patience import PATIENCE_S


def test_importing_loads_nothing_heavy():
    code = (
        "import sys, spantrain\n"
        "assert not {'torch', 'transformers', 'typer', 'zmq', 'grpc'} & set(sys.modules)\n"
        "assert spantrain.TrainingArguments(max_steps=1).max_steps == 1\n"
        "assert 'torch' not in sys.modules\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert ended.returncode == 0, ended.stderr


def test_all_that_is_offered_is_there():
    for name in spantrain.__all__:
        assert getattr(spantrain, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        _ = spantrain.Trainr


@pytest.mark.parametrize(
    ("given_name", "says"),
    [
        ("learning_rat", "did you mean learning_rate?"),
        ("max_step", "did you mean max_steps?"),
        ("save_limit", "did you mean"),
        ("zzz", "known: adam_beta1"),
        ("per_device_train_batch_size", "say train_batch_size"),
        ("gradient_accumulation_steps", "say train_batch_size"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(given_name, says):
    with pytest.raises(ConfigError, match="TrainingArguments") as refused:
        spantrain.TrainingArguments(**{given_name: 1})
    assert given_name in str(refused.value)
    assert says in str(refused.value)


def test_values_of_another_type_are_named():
    with pytest.raises(
        ConfigError, match=r"max_steps must be a whole number, got 2\.5; learning_rate .* number, got '1'"
    ):
        spantrain.TrainingArguments(learning_rate="1", max_steps=2.5)
    assert spantrain.TrainingArguments(learning_rate=1).learning_rate == 1
    with pytest.raises(ConfigError, match="resume_from_checkpoint must be True or a folder, got 3"):
        spantrain.TrainingArguments(resume_from_checkpoint=3)


@pytest.mark.parametrize(
    ("callbacks", "says"),
    [(spantrain.Callback(), "got a Callback"), ([print], "a builtin"), ([spantrain.Callback], "the class Callback")],
)
def test_callbacks_are_a_list_of_objects(callbacks, says):
    with pytest.raises(ConfigError, match=says):
        checked_callbacks(callbacks)


def test_every_name_of_the_transformers_library_is_known_or_refused_with_what_to_do():
    own = {field.name for field in dataclasses.fields(spantrain.TrainingArguments)}
    theirs = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert theirs - own <= ELSEWHERE.keys()
    assert not own & ELSEWHERE.keys()
    for name, why in ELSEWHERE.items():
        with pytest.raises(ConfigError, match=re.escape(f"TrainingArguments: {name} has no place here: {why}")):
            spantrain.TrainingArguments(**{name: True})


def test_when_it_saves_and_evaluates():
    def every(steps=30, **given):
        job = spantrain.TrainingArguments(num_train_epochs=3, **given).job(steps, {})
        return job.checkpoint_every, job.evaluate_every

    assert every() == (500, 0)
    assert every(save_strategy="no", eval_steps=7) == (0, 7)
    assert every(save_strategy="epoch", eval_strategy="epoch") == (10, 10)
    assert every(eval_strategy="steps", logging_steps=4) == (500, 4)
    assert every(save_strategy=transformers.trainer_utils.SaveStrategy.STEPS, save_steps=5) == (5, 0)
    for wrong, says in (
        ({"save_strategy": "best"}, "save_strategy best: give steps with load_best_model_at_end"),
        ({"save_strategy": "epoch", "max_steps": 5}, "save_strategy epoch goes with num_train_epochs"),
        ({"eval_strategy": "no", "eval_steps": 5}, "has no eval_steps, got 5"),
        ({"eval_strategy": "steps", "logging_steps": 0}, "needs eval_steps"),
        ({"eval_strategy": "stepss"}, "did you mean steps"),
    ):
        with pytest.raises(ConfigError, match=says):
            spantrain.TrainingArguments(**wrong)


def test_the_order_of_samples_has_a_seed_of_its_own():
    assert spantrain.TrainingArguments(max_steps=1, seed=3).job(1, {}).order_seed == 3
    job = spantrain.TrainingArguments(max_steps=1, seed=3, data_seed=4).job(1, {})
    assert (job.seed, job.order_seed) == (3, 4)


def test_an_optimizer_that_is_made_already_is_refused():
    """Its parameters are not the workers', and its settings would be lost."""
    with pytest.raises(ConfigError, match="each device makes its own"):
        given_optimizer(torch.optim.AdamW([torch.zeros(1)], lr=1.0))
    with pytest.raises(ConfigError, match=r"functools.partial\(torch.optim.AdamW, lr=...\)"):
        given_optimizer(functools.partial(torch.optim.AdamW, [], 0.5))  # whose rate has no name


def test_wrong_values_are_named_together():
    with pytest.raises(ConfigError) as refused:
        spantrain.TrainingArguments(bf16=True, fp16=True, report_to="comet", lr_scheduler_type="cos", save_steps=-1)
    for text in ("exclude each other", "comet", "tensorboard", "cos", "save_steps"):
        assert text in str(refused.value)
    with pytest.raises(ConfigError, match="needs output_dir"):
        spantrain.TrainingArguments(resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match="nothing to do"):
        spantrain.TrainingArguments(max_steps=0)


def test_a_job_says_what_the_arguments_say():
    arguments = spantrain.TrainingArguments(
        max_steps=20,
        learning_rate=0.1,
        warmup_steps=4,
        weight_decay=0.2,
        max_grad_norm=0,
        save_steps=7,
        seed=3,
        bf16=True,
    )
    job = arguments.job(arguments.steps(samples=100), {})
    assert (job.steps, job.seed, job.weight_decay, job.max_grad_norm) == (20, 3, 0.2, None)
    assert (job.checkpoint_every, job.optimizer, arguments.dtype) == (7, "adamw", "bfloat16")
    assert [learning_rate(job, step) for step in (0, 2, 4)] == pytest.approx([0.0, 0.05, 0.1])
    assert learning_rate(job, 12) == pytest.approx(0.05)
    assert learning_rate(job, 20) == 0.0
    by_part = spantrain.TrainingArguments(max_steps=20, warmup_ratio=0.21)
    assert by_part.job(20, {}).warmup_steps == 5
    assert spantrain.TrainingArguments(max_steps=20, warmup_steps=0.1).job(20, {}).warmup_steps == 2
    with pytest.raises(ConfigError, match="constant has no warm-up; constant_with_warmup has"):
        spantrain.TrainingArguments(lr_scheduler_type="constant", warmup_steps=3)
    assert arguments.job(20, {"optimizer": "sgd", "learning_rate": 0.5}).learning_rate == 0.5


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize(
    "name", ["learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"]
)
def test_numbers_that_make_no_sense_are_refused_at_once(name, value):
    with pytest.raises(ConfigError, match=rf"TrainingArguments: {name} must .*, got {value}"):
        spantrain.TrainingArguments(**{name: value})


def test_of_what_optimizer_and_model_are_given_too(tmp_path):
    given = {"max_steps": 1, "output_dir": tmp_path / "run"}
    for optimizer, says in (
        (functools.partial(torch.optim.AdamW, lr=math.nan), "learning_rate must be a finite number, got nan"),
        (functools.partial(torch.optim.SGD, momentum=1.0), "momentum must be at least 0 and less than 1"),
        (functools.partial(torch.optim.AdamW, betas=0.9), "betas must be two numbers, got 0.9"),
        (functools.partial(torch.optim.AdamW, eps="small"), "adam_epsilon must be a finite number, got 'small'"),
    ):
        with pytest.raises(ConfigError, match=says):
            spantrain.Trainer("gpt2-tiny", optimizer=optimizer, args=spantrain.TrainingArguments(**given))
    with pytest.raises(ConfigError, match="sequence_length must be a whole number, got nan"):
        spantrain.Trainer("gpt2-tiny", sequence_length=math.nan, args=spantrain.TrainingArguments(**given))
    for name in ("join_timeout_s", "heartbeat_timeout_s"):
        with pytest.raises(ConfigError, match=f"SessionOptions: {name} must be a finite number of seconds over 0"):
            SessionOptions(**{name: math.nan})


def test_sgd_has_the_momentum_that_torch_gives_it():
    arguments = spantrain.TrainingArguments(max_steps=1, optim="sgd")
    assert arguments.job(1, {}).momentum == arguments.job(1, given_optimizer(torch.optim.SGD)).momentum == 0.0
    partial = functools.partial(torch.optim.SGD, momentum=0.5)
    assert arguments.job(1, given_optimizer(partial)).momentum == 0.5


@given(samples=st.integers(1, 500), batch=st.integers(1, 64), epochs=st.floats(0.1, 5))
def test_epochs_are_steps_of_the_whole_data(samples, batch, epochs):
    steps = spantrain.TrainingArguments(num_train_epochs=epochs, train_batch_size=batch).steps(samples)
    assert steps == max(1, round(epochs * samples / batch))


def test_optimizers_are_told_by_class_and_arguments():
    assert given_optimizer(None) == {}
    assert given_optimizer(torch.optim.SGD) == {"optimizer": "sgd"}
    partial = functools.partial(torch.optim.AdamW, lr=0.5, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    job = spantrain.TrainingArguments(max_steps=1).job(1, given_optimizer(partial))
    ours = build_optimizer(job, [torch.nn.Parameter(torch.ones(1))]).param_groups[0]
    theirs = partial([torch.nn.Parameter(torch.ones(1))]).param_groups[0]
    for name in ("lr", "betas", "eps", "weight_decay"):
        assert ours[name] == theirs[name]
    nesterov = given_optimizer(functools.partial(torch.optim.SGD, momentum=0.5, nesterov=True))
    assert nesterov == {"optimizer": "sgd", "momentum": 0.5, "optimizer_options": {"nesterov": True}}
    for wrong, says in (
        (torch.optim.Rprop, "steps by the sign"),
        (functools.partial(torch.optim.AdamW, fused=True), "fused: each device chooses that"),
        (functools.partial(torch.optim.Adagrad, lr_decy=1.0), "did you mean lr_decay"),
        (transformers.Adafactor, "Adafactor is none of torch's classes"),
        ("adamv", "did you mean adam"),
    ):
        with pytest.raises(ConfigError, match=says):
            given_optimizer(wrong)


def test_optimizers_by_name_with_arguments():
    def job(**given):
        return spantrain.TrainingArguments(max_steps=1, **given).job(1, {})

    assert job(optim="adamw_torch_fused", optim_args="amsgrad=true, adam_beta2=0.95").adam_beta2 == 0.95
    assert job(optim="rmsprop", optim_args={"alpha": 0.9}).optimizer_options == {"alpha": 0.9}
    assert job(optim=transformers.training_args.OptimizerNames.ADAFACTOR).optimizer == "adafactor"
    for optim, says in (("adamw_8bit", "another package's"), ("rmsprob", "did you mean rmsprop"), ("lomo", "another")):
        with pytest.raises(ConfigError, match=rf"TrainingArguments: optim .*{says}"):
            job(optim=optim)
    with pytest.raises(ConfigError, match="alpha of optim rmsprop must be a finite number"):
        job(optim="rmsprop", optim_args="alpha=x")


def at_top_level():
    """What a user's factory is like."""


def test_functions_are_told_by_file_and_name():
    assert function_source("mine.py:build", "model") == "mine.py:build"
    assert function_source(at_top_level, "model") == f"{__file__}:at_top_level"
    for wrong in (lambda: None, _inside(), str.upper, functools.partial(at_top_level)):
        with pytest.raises(ConfigError, match=r"^model: .* cannot be imported by workers"):
            function_source(wrong, "model")
    typed = {}
    exec("def typed(): pass", typed)
    with pytest.raises(ConfigError, match="typed is not in a file"):
        function_source(typed["typed"], "loss_fn")


def test_of_an_object_is_said_what_to_give_instead():
    class Model:
        def save_pretrained(self, folder):
            """As models of the transformers library have it."""

    with pytest.raises(
        ConfigError, match=r"an object, a Model, cannot be imported .*save_pretrained\('FOLDER'\), and give 'hf:"
    ):
        function_source(Model(), "model")


def _inside():
    def inner():
        pass

    return inner
