"""The options of `spantrain train`, and the job that they make."""

import math
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from spantrain.cli import options as shared
from spantrain.core.job import ADAPTERS, TrainJob
from spantrain.core.records import LARGEST_NUMBER
from spantrain.core.update.optimizers import named_values, optimizer_fields
from spantrain.core.update.rates import LR_SCHEDULES
from spantrain.errors import ConfigError
from spantrain.formats.registry import WireFormat
from spantrain.recovery.policy import OnLoss
from spantrain.schedule.registry import own_schedules

_NO_OPTIONS = (
    "steps", "momentum", "adam_beta1", "adam_beta2", "adam_epsilon", "loss_scale", "lr_schedule_options",
    "optimizer_options", "parameter_groups",
)  # fmt: skip
_AS_THEY_ARE = tuple(field.name for field in fields(TrainJob) if field.name not in _NO_OPTIONS)
JOB_OPTIONS = (*_AS_THEY_ARE, "optimizer_option", "lr_schedule_option", "warmup_ratio", "no_decay_on_norms")
"""Options that make up the job; a resumed run has them from its checkpoint."""
_WARMUP_STEPS = 10


class TrainArguments(shared.ModelOptions, shared.PlaceOptions):
    """What stands on the command line, or else the default."""

    plan_path: Annotated[Path | None, typer.Argument(help="What `spantrain plan` wrote.")] = None
    model: Annotated[str | None, "Without a plan: measure, plan and train this model."] = None
    gradient_checkpointing: Annotated[
        bool | None, "With --model: compute all activations again, or none; default: where memory is short."
    ] = None
    from_scratch: Annotated[bool, "Random weights, though the folder of an hf: model has some."] = False
    global_batch: Annotated[
        int, typer.Option(help="With --model: samples per optimizer step.", min=1, max=shared.MAX_SAMPLES)
    ] = 32
    steps: Annotated[
        int, typer.Option(help="Steps in all, those before a resume included.", min=1, max=LARGEST_NUMBER)
    ] = 100
    out: Annotated[Path | None, "Folder of the run; made when missing."] = None
    overwrite: Annotated[bool, "Remove the run that --out holds, and nothing else."] = False
    resume: Annotated[Path | None, "Folder of an earlier run: go on from its checkpoint."] = None
    other_plan: Annotated[Path | None, typer.Option("--plan", help="With --resume: go on under this plan.")] = None
    function: shared.Functions = None
    schedule: Annotated[str | None, f"{', '.join(own_schedules())}, or a package's; default: the plan's."] = None
    optimizer: shared.Optimizer = "adamw"
    optimizer_option: Annotated[list[str] | None, "NAME=VALUE of it, such as adam_beta2=0.95; may be repeated."] = None
    learning_rate: Annotated[float, "After the warm-up."] = 3e-3
    lr_schedule: Annotated[str, f"{', '.join(LR_SCHEDULES)}."] = "constant_with_warmup"
    lr_schedule_option: Annotated[
        list[str] | None, "NAME=VALUE of the schedule, such as num_cycles=2; may be repeated."
    ] = None
    warmup_steps: Annotated[int | None, "Steps of warm-up, from the rate 0; default: 10."] = None
    warmup_ratio: Annotated[float | None, typer.Option(help="The same as a part of --steps.", min=0.0, max=1.0)] = None
    decay_steps: Annotated[int | None, "Where the schedule ends; default: at --steps."] = None
    weight_decay: Annotated[float, "Of the optimizer."] = 0.01
    no_decay_on_norms: Annotated[bool, "Weights decay; biases and normalizations do not."] = False
    max_grad_norm: Annotated[float, "Clip to this global norm; 0: do not clip."] = 1.0
    seed: Annotated[int, "Of weights and data order."] = 0
    data_seed: Annotated[int | None, "Of data order alone; default: --seed."] = None
    checkpoint_every: Annotated[int, "Steps between checkpoints; 0: at the end, and as docs/checkpoints.md says."] = 0
    keep_checkpoints: Annotated[int, typer.Option(help="So many stay, the newest.", min=1)] = 2
    gather: Annotated[bool, "Bring here what other machines save (docs/checkpoints.md)."] = True
    standby_coordinator: Annotated[str, "The device on whose machine the run can go on, should this one be lost."] = ""
    evaluate_every: Annotated[int, "Steps between held-out evaluations; 0: never."] = 0
    trace_steps: Annotated[int, "The last so many steps go into trace.json."] = 3
    report_to: Annotated[
        list[str] | None, "Give scalars to tensorboard, wandb, trackio or mlflow; may be repeated."
    ] = None
    adapter: Annotated[str, f"What follows the network: {', '.join(ADAPTERS)}."] = "auto"
    allow_wire: Annotated[list[WireFormat] | None, "With --adapter auto: what slow cuts may be rounded to."] = None
    batch_norm: Annotated[
        str, "Statistics of batches: micro-batch, replicas (of a stage), frozen; auto: micro-batch for your models."
    ] = "auto"
    staleness: Annotated[
        int, typer.Option(help="1: steps overlap, with weights one step old (docs/staleness.md).", min=0, max=1)
    ] = 0
    page: Annotated[bool, "Serve a page that shows the run while it goes on (docs/page.md)."] = False
    page_listen: Annotated[str, "HOST:PORT of it; port 0: any that is free."] = shared.PAGE_LISTEN
    network_trace: shared.NetworkTraceName = None
    lost_after: Annotated[
        str | None,
        "After what silence a worker is lost; default: with --listen as measured, under 2s on a calm network and 6s at "
        "most; a minute for those of this machine. Longer where networks have outages.",
    ] = None
    on_loss: Annotated[OnLoss, "A lost device: go-on with those that are left, or end (docs/recovery.md)."] = (
        OnLoss.GO_ON
    )
    protect: Annotated[str, "Losses at once that cost one step only: none, one, N; auto: one, if it is cheap."] = "auto"
    faults: Annotated[Path | None, "JSON list of faults to make on purpose, to see what becomes of the run."] = None

    def job(self, *, adapter_given: bool) -> TrainJob:
        """Return how to train; where steps overlap, no adapter follows the network unless one was asked for.

        Raises:
            ConfigError: a value is wrong, or two contradict each other.
        """
        values = {name: getattr(self, name) for name in _AS_THEY_ARE}
        values["max_grad_norm"] = self.max_grad_norm or None
        values["allow_wire"] = tuple(dict.fromkeys(self.allow_wire or ()))
        if self.staleness and not adapter_given:
            values["adapter"] = "off"
        given = self.warmup_steps is not None or self.warmup_ratio is not None
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ConfigError("--warmup-steps and --warmup-ratio say the same; give one")
        if given and self.lr_schedule == "constant":
            raise ConfigError("--lr-schedule constant has no warm-up; constant_with_warmup has")
        warmup_steps = _WARMUP_STEPS if self.warmup_steps is None else self.warmup_steps
        if self.warmup_ratio is not None:
            warmup_steps = math.ceil(self.steps * self.warmup_ratio)
        values["warmup_steps"] = warmup_steps
        values["decay_steps"] = max(self.steps, warmup_steps + 1) if self.decay_steps is None else self.decay_steps
        try:
            values["lr_schedule_options"] = named_values("--lr-schedule-option", self.lr_schedule_option or ())
            values |= optimizer_fields(self.optimizer, named_values("--optimizer-option", self.optimizer_option or ()))
            return TrainJob(steps=self.steps, **values)
        except ValueError as error:
            raise ConfigError(str(error)) from None
