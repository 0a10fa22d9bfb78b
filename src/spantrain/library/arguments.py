"""How to train, by the names that people know from the transformers library's trainer."""

import difflib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from spantrain.app.planning.protection import losses_of
from spantrain.app.training.trackers import chosen_trackers
from spantrain.core.job import TrainJob
from spantrain.core.names import unknown_name
from spantrain.core.records import Bounds, NotNegative, bound_problems, type_problems
from spantrain.core.update.optimizers import named_values, optimizer_fields
from spantrain.core.update.rates import needs_end
from spantrain.errors import ConfigError
from spantrain.formats.precision import LOW_WEIGHTS

__all__ = ["TrainingArguments"]

T = TypeVar("T")

_BATCH = "devices are not alike, so the planner shares samples out; say train_batch_size, the samples of a step"
_EVALUATION = "held-out samples are shared out as those of training are; leave it out"
_LOADING = "samples are read on the devices that need them, in an order that every plan has; leave it out"
_PLACES = "the plan says what runs where; leave it out"
_LINES = "lines go to standard error every logging_steps, and every step into metrics.jsonl; leave it out"
_HUB = "nothing is uploaded; `spantrain export RUN --to FOLDER`, then `huggingface-cli upload`, leave it out here"
_PRECISION = "bf16 and fp16 say what is computed with, in training and evaluation; leave it out"
_COMMANDS = "it is for scripts with a command line of their own; call what is wanted, and leave it out"
_MODEL = "the model runs as its factory returns it; do it there, and leave it out"
_SAVING = "a checkpoint has all that a run needs to go on, in each device's own file; leave it out"
_CALLBACKS = "metrics are of all samples, as they were passed; leave it out"

_REASONS: Mapping[str, tuple[str, ...]] = {
    _BATCH: (
        "per_device_train_batch_size", "per_gpu_train_batch_size", "gradient_accumulation_steps",
        "auto_find_batch_size",
    ),
    _EVALUATION: ("per_device_eval_batch_size", "per_gpu_eval_batch_size", "eval_accumulation_steps"),
    _LOADING: (
        "dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
        "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order", "ignore_data_skip",
        "train_sampling_strategy", "group_by_length", "length_column_name", "remove_unused_columns", "label_names",
    ),
    _PLACES: (
        "deepspeed", "fsdp", "fsdp_config", "fsdp_min_num_params", "accelerator_config", "parallelism_config",
        "local_rank",
        "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend",
        "ddp_timeout", "use_cpu", "no_cuda", "average_tokens_across_devices", "torch_empty_cache_steps",
    ),
    _LINES: (
        "logging_strategy", "logging_first_step", "log_on_each_node", "logging_nan_inf_filter", "logging_dir",
        "log_level",
        "log_level_replica", "disable_tqdm", "include_num_input_tokens_seen", "skip_memory_metrics", "debug",
        "include_tokens_per_second",
    ),
    _HUB: (
        "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push",
        "hub_revision",
        "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
    ),
    _PRECISION: ("bf16_full_eval", "fp16_full_eval", "tf32", "half_precision_backend", "fp16_opt_level"),
    _COMMANDS: ("do_train", "do_eval", "do_predict"),
    _MODEL: (
        "torch_compile_backend", "torch_compile_mode", "use_liger_kernel", "liger_kernel_config",
        "use_cache", "neftune_noise_alpha", "label_smoothing_factor", "optim_target_modules",
    ),
    _SAVING: (
        "save_only_model", "save_on_each_node", "save_safetensors", "enable_jit_checkpoint",
        "restore_callback_states_from_checkpoint",
    ),
    _CALLBACKS: (
        "prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object", "include_for_metrics",
        "include_inputs_for_metrics", "batch_eval_metrics",
    ),
    "a run is evaluated before its first step in any case, and then every eval_steps; leave it out": (
        "eval_on_start", "eval_delay",
    ),
    "the same seed gives the same run already; leave it out": ("full_determinism",),
    "a unit is computed again as a whole; leave it out": (
        "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs",
    ),
    "it is called gradient_checkpointing": ("activation_checkpointing",),
    "it is called eval_strategy": ("evaluation_strategy",),
}  # fmt: skip
ELSEWHERE: Mapping[str, str] = MappingProxyType({name: why for why, names in _REASONS.items() for name in names})

_OPTIM: Mapping[str, str] = MappingProxyType({"adamw_torch": "adamw", "adamw_torch_fused": "adamw"})
"""Names that the library has for torch's optimizers, where they are not torch's own."""
_STRATEGIES = ("no", "steps", "epoch")
_AS_THEY_ARE = (
    "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "seed", "data_seed", "batch_norm",
)  # fmt: skip


def _word(given: object) -> str:
    """Return a name; the transformers library has some of them as members of an enumeration."""
    return str(getattr(given, "value", given))


def _with_known_names(cls: type[T]) -> type[T]:
    """Have a dataclass refuse names that it does not have in one clear message."""
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    made = cls.__init__

    @functools.wraps(made)
    def checked(self: T, **given: Any) -> None:
        problems = [_unknown(name, known) for name in given if name not in known]
        if problems:
            raise ConfigError("TrainingArguments: " + "; ".join(problems))
        made(self, **given)

    setattr(cls, "__init__", checked)  # noqa: B010 - a plain assignment to a method is refused by the type checker
    return cls


def _unknown(name: str, known: list[str]) -> str:
    if name in ELSEWHERE:
        return f"{name} has no place here: {ELSEWHERE[name]}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"there is no {name}; " + (f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}")


@_with_known_names
@dataclass(frozen=True, kw_only=True)
class TrainingArguments:
    """What is to be done, and where it is kept. Defaults are the transformers library's, but for the batch."""

    output_dir: str | Path = ""
    """The run's folder: checkpoints, trace, logs, profile and plan; empty: a new one under `runs`."""
    overwrite_output_dir: bool = False
    """Remove the run that `output_dir` holds; otherwise such a folder is refused, unless the run is gone on with."""
    train_batch_size: Annotated[int, Bounds(low=1)] = 32
    """Samples of one optimizer step, over all devices."""
    max_steps: int = -1
    """In all; negative: as many as `num_train_epochs` need."""
    num_train_epochs: float = 3.0
    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    """Of weights; biases and normalizations do not decay, unless the trainer is given an `optimizer` of torch's."""
    parameter_groups: str | Callable[..., Any] = ""
    """`all`: one group; `norms`: biases and normalizations do not decay; or a function `(name, parameter)`, or its
    `FILE.py:FUNCTION`, that returns a dict of options. Empty: `all` with an `optimizer` of torch's, else `norms`."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: NotNegative = 1.0
    """0: gradients are not clipped."""
    lr_scheduler_type: str = "linear"
    """One of the library's that are a function of the step: `linear`, `cosine`, `polynomial`, ..."""
    lr_scheduler_kwargs: Mapping[str, Any] | None = None
    """What the schedule takes besides, such as `{"num_cycles": 2}`."""
    warmup_steps: NotNegative = 0.0
    """From the rate 0; below 1: a part of all steps."""
    warmup_ratio: Annotated[float, Bounds(low=0, high=1)] = 0.0
    """The same as a part of all steps; `warmup_steps` goes before it."""
    optim: str = "adamw_torch"
    """`adamw_torch`, or one of torch's by name, `adafactor` or `sgd`; the trainer's `optimizer` goes before it."""
    optim_args: Mapping[str, Any] | str | None = None
    """What it takes besides: `{"amsgrad": True}`, or as text, `amsgrad=true`."""
    dropout: str = "on"
    """`on` or `off`: train in evaluation mode."""
    torch_compile: bool = False
    """Layers are compiled."""
    seed: int = 42
    """Of weights, random numbers while training, and the order of samples."""
    data_seed: int | None = None
    """Of the order of samples alone, where it is another one."""
    batch_norm: str = "auto"
    """What BatchNorm goes by: `micro-batch`, statistics of the samples that a device runs at once; `frozen`, its
    running ones; `auto`: the first, but for models of the catalogue."""
    bf16: bool = False
    bf16_weights: bool = False
    """Weights are bfloat16 as well, of float32 ones that the optimizer updates."""
    fp16: bool = False
    """With a loss scale that all stages agree on."""
    save_strategy: str = "steps"
    """`steps`, `epoch` or `no`; a checkpoint is written at the end in any case."""
    save_steps: Annotated[int, Bounds(low=0)] = 500
    """Steps between checkpoints, with `steps`."""
    save_total_limit: Annotated[int, Bounds(low=1)] = 2
    """Checkpoints that are kept."""
    load_best_model_at_end: bool = False
    """Keep the checkpoint with the best evaluation, and give its weights when training has ended."""
    metric_for_best_model: str | None = None
    """Name of a metric, with or without `eval_`; None: `loss`."""
    greater_is_better: bool | None = None
    """Of that metric; None: unless its name ends with `loss`."""
    logging_steps: Annotated[int, Bounds(low=0)] = 10
    """Steps between lines on standard error and scalars, whose loss is the mean over them; 0: none of either."""
    eval_strategy: str = ""
    """`steps`, `epoch` or `no`; empty: `steps` where there are `eval_steps`, else `no`."""
    eval_steps: Annotated[int, Bounds(low=0)] = 0
    """Steps between evaluations on held-out data; 0: as `logging_steps`, where `eval_strategy` is `steps`."""
    report_to: str | Sequence[str] = "none"
    """`tensorboard` (in the run's folder, under `tensorboard`), `wandb`, `trackio`, `mlflow`, or several of them."""
    run_name: str = ""
    """For those; empty: the name of the run's folder."""
    project: str = ""
    """For those; empty: what their own environment or default says."""
    gradient_checkpointing: bool | None = None
    """Compute all activations again in the backward pass, or none; None: where memory is short."""
    from_scratch: bool = False
    """Random weights, though the folder of an `hf:` model has some."""
    gather: bool = True
    """Have what other machines save on this one, too."""
    protect: str = "auto"
    """Losses of devices at once that cost the step under way and no more: `none`, `one`, a number; `auto`: one, where
    copies cost next to nothing."""
    resume_from_checkpoint: bool | str | Path = False
    """True: go on from the newest checkpoint in `output_dir`; or the folder of another run."""

    def __post_init__(self) -> None:
        metric = self.metric_for_best_model or "loss"
        object.__setattr__(self, "metric_for_best_model", metric)  # callbacks read these two
        if self.greater_is_better is None:
            object.__setattr__(self, "greater_is_better", not str(metric).endswith("loss"))
        if wrong := type_problems(self):
            raise ConfigError("TrainingArguments: " + "; ".join(wrong))
        problems = bound_problems(self)
        if (self.bf16 or self.bf16_weights) and self.fp16:
            problems.append("bf16 and fp16 exclude each other")
        if self.lr_scheduler_type == "constant" and (self.warmup_steps or self.warmup_ratio):
            problems.append("lr_scheduler_type constant has no warm-up; constant_with_warmup has")
        if self.max_steps == 0 or (self.max_steps < 0 and self.num_train_epochs <= 0):
            problems.append(f"nothing to do: max_steps {self.max_steps}, num_train_epochs {self.num_train_epochs}")
        resume: object = self.resume_from_checkpoint or ""
        if not isinstance(resume, str | Path | bool):
            problems.append(f"resume_from_checkpoint must be True or a folder, got {resume!r}")
        if self.resume_from_checkpoint is True and not self.output_dir:
            problems.append("resume_from_checkpoint=True needs output_dir, the folder of the run to go on with")
        try:
            if chosen_trackers(self.report_to) and not self.logging_steps:
                problems.append(f"report_to {self.report_to!r} needs logging_steps: scalars are given so often")
            losses_of(self.protect)
        except ConfigError as error:
            problems.append(str(error).removeprefix("--"))
        problems += [*self._strategy_problems(), *self._best_problems(), *self._group_problems()]
        if self.dropout not in ("on", "off"):
            problems.append(f"dropout must be on or off, got {self.dropout!r}")
        try:
            self._job(1, {})
        except ValueError as error:
            problems.append(_in_own_words(error))
        if problems:
            raise ConfigError("TrainingArguments: " + "; ".join(problems))

    @property
    def dtype(self) -> str:
        """Type of numbers, as plans name it."""
        if self.bf16_weights:
            return LOW_WEIGHTS
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"

    def steps(self, samples: int) -> int:
        """Return how many steps to do, with so many samples in an epoch."""
        if self.max_steps > 0:
            return self.max_steps
        return max(1, round(self.num_train_epochs * samples / self.train_batch_size))

    @property
    def _eval_strategy(self) -> str:
        return _word(self.eval_strategy) or ("steps" if self.eval_steps else "no")

    @property
    def evaluates(self) -> bool:
        """Whether held-out data is asked for while training."""
        return self._eval_strategy != "no"

    def _every(self, strategy: str, every: int, steps: int) -> int:
        """Return the steps between two of what a strategy asks for; 0: it does not."""
        if strategy == "epoch":
            return max(1, round(steps / self.num_train_epochs))
        return every if strategy == "steps" else 0

    def _group_problems(self) -> Iterator[str]:
        rule = self.parameter_groups
        if not callable(rule) and rule not in ("", "all", "norms") and ":" not in rule:
            yield f"parameter_groups must be all, norms, a function, or FILE.py:FUNCTION, got {rule!r}"

    def _strategy_problems(self) -> Iterator[str]:
        for name, strategy in (("save_strategy", _word(self.save_strategy)), ("eval_strategy", self._eval_strategy)):
            if (name, strategy) == ("save_strategy", "best"):
                yield "save_strategy best: give steps with load_best_model_at_end, which keeps the best one"
            elif strategy not in _STRATEGIES:
                yield unknown_name(name, strategy, _STRATEGIES)
            elif strategy == "epoch" and self.max_steps > 0:
                yield f"{name} epoch goes with num_train_epochs; with max_steps {self.max_steps}, give steps"
        if self._eval_strategy == "no" and self.eval_steps:
            yield f"eval_strategy no has no eval_steps, got {self.eval_steps}"
        if self._eval_strategy == "steps" and not (self.eval_steps or self.logging_steps):
            yield "eval_strategy steps needs eval_steps"

    def _best_problems(self) -> Iterator[str]:
        """Say what keeps the best checkpoint from being known: evaluations, each with a checkpoint of its step."""
        if not isinstance(self.metric_for_best_model, str):
            yield f"metric_for_best_model must be the name of a metric, got {self.metric_for_best_model!r}"
        if not self.load_best_model_at_end:
            return
        saves, evaluates = _word(self.save_strategy), self._eval_strategy
        every = self.eval_steps or self.logging_steps
        if evaluates == "no" or saves != evaluates:
            yield (
                f"load_best_model_at_end needs eval_strategy and save_strategy to be the same, steps or epoch; got "
                f"{evaluates} and {saves}"
            )
        elif evaluates == "steps" and every and (not self.save_steps or self.save_steps % every):
            yield (
                f"load_best_model_at_end needs save_steps to be a multiple of eval_steps; got {self.save_steps} and "
                f"{every}"
            )

    def _optimizer(self) -> dict[str, Any]:
        """Return the fields of a job that `optim` and `optim_args` say."""
        given = self.optim_args or {}
        if isinstance(given, str):
            given = named_values("optim_args", given.replace(" ", "").split(","))
        name = _word(self.optim)
        return optimizer_fields(_OPTIM.get(name, name), given)

    @property
    def rates_need_end(self) -> bool:
        """Whether learning rates depend on how many steps there are."""
        by_part = 0 < self.warmup_steps < 1 or (self.warmup_ratio > 0 and not self.warmup_steps)
        return by_part or needs_end(_word(self.lr_scheduler_type))

    def job(self, steps: int, optimizer: Mapping[str, Any]) -> TrainJob:
        """Return the job of so many steps; what `optimizer` says goes before these arguments.

        Raises:
            ConfigError: values contradict each other.
        """
        try:
            return self._job(steps, optimizer)
        except ValueError as error:
            raise ConfigError(f"TrainingArguments: {_in_own_words(error)}") from None

    def _job(self, steps: int, optimizer: Mapping[str, Any]) -> TrainJob:
        # As the transformers library has it.
        part = self.warmup_steps or self.warmup_ratio
        warmup_steps = int(part) if self.warmup_steps >= 1 else math.ceil(steps * part)
        fields_of_job: dict[str, Any] = {
            "steps": steps,
            "momentum": 0.0,
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
            **({} if "optimizer" in optimizer else self._optimizer()),
            "warmup_steps": warmup_steps,
            "lr_schedule": _word(self.lr_scheduler_type),
            "lr_schedule_options": self.lr_scheduler_kwargs or {},
            "decay_steps": max(steps, warmup_steps + 1),
            "max_grad_norm": self.max_grad_norm or None,
            "checkpoint_every": self._every(_word(self.save_strategy), self.save_steps, steps),
            "evaluate_every": self._every(self._eval_strategy, self.eval_steps or self.logging_steps, steps),
            **optimizer,
        }
        return TrainJob(**fields_of_job)


def _in_own_words(error: ValueError) -> str:
    return str(error).replace("lr_schedule", "lr_scheduler_type").replace("optimizer ", "optim ")
