"""The options of `spantrain train`, and the job that they make."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from spantrain.cli.options import (
    MAX_SAMPLES,
    ChatTemplate,
    ClusterFile,
    Data,
    Dtype,
    EmulatedSpeed,
    Functions,
    Insecure,
    Json,
    Listen,
    LostAfter,
    NetworkTraceName,
    NoNetwork,
    Packing,
    Preset,
    SequenceLength,
    Tokenizer,
    TrainOn,
)
from spantrain.core.job import ADAPTERS, LARGEST_NUMBER, TrainJob
from spantrain.errors import ConfigError
from spantrain.formats.registry import WireFormat
from spantrain.schedule.registry import own_schedules

_NO_OPTIONS = ("steps", "momentum", "adam_beta1", "adam_beta2", "adam_epsilon", "loss_scale")
JOB_OPTIONS = tuple(field.name for field in fields(TrainJob) if field.name not in _NO_OPTIONS)
"""Options that make up the job; a resumed run has them from its checkpoint."""


@dataclass(frozen=True, kw_only=True)
class TrainArguments:
    """What stands on the command line, or else the default."""

    plan_path: Annotated[Path | None, typer.Argument(help="What `spantrain plan` wrote.")] = None
    model: Annotated[str | None, typer.Option(help="Without a plan: measure, plan and train this model.")] = None
    preset: Preset = None
    cluster: ClusterFile = None
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Random weights, though the folder of an hf: model has some.")
    ] = False
    data: Data = None
    tokenizer: Tokenizer = None
    sequence_length: SequenceLength = None
    chat_template: ChatTemplate = None
    train_on: TrainOn = None
    packing: Packing = False
    global_batch: Annotated[
        int, typer.Option(help="With --model: samples per optimizer step.", min=1, max=MAX_SAMPLES)
    ] = 32
    dtype: Dtype = "float32"
    emulated_speed: EmulatedSpeed = None
    steps: Annotated[
        int, typer.Option(help="Steps in all, those before a resume included.", min=1, max=LARGEST_NUMBER)
    ] = 100
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the run; made when missing.")] = None
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove the run that --out holds, and nothing else.")
    ] = False
    resume: Annotated[Path | None, typer.Option(help="Folder of an earlier run: go on from its checkpoint.")] = None
    other_plan: Annotated[Path | None, typer.Option("--plan", help="With --resume: go on under this plan.")] = None
    function: Functions = None
    schedule: Annotated[
        str | None, typer.Option(help=f"{', '.join(own_schedules())}, or a package's; default: the plan's.")
    ] = None
    optimizer: Annotated[str, typer.Option(help="adamw or sgd.")] = "adamw"
    learning_rate: Annotated[float, typer.Option(help="After the warm-up.")] = 3e-3
    lr_schedule: Annotated[str, typer.Option(help="constant; cosine or linear: down to zero at --decay-steps.")] = (
        "constant"
    )
    warmup_steps: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = 10
    decay_steps: Annotated[int, typer.Option(help="Where cosine and linear end.")] = 1000
    weight_decay: Annotated[float, typer.Option(help="Of the optimizer.")] = 0.01
    max_grad_norm: Annotated[float, typer.Option(help="Clip to this global norm; 0: do not clip.")] = 1.0
    seed: Annotated[int, typer.Option(help="Of weights and data order.")] = 0
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0: only at the end.")] = 0
    keep_checkpoints: Annotated[int, typer.Option(help="So many stay, the newest.", min=1)] = 2
    evaluate_every: Annotated[int, typer.Option(help="Steps between held-out evaluations; 0: never.")] = 0
    trace_steps: Annotated[int, typer.Option(help="The last so many steps go into trace.json.")] = 3
    report_to: Annotated[
        list[str] | None, typer.Option(help="Give scalars to tensorboard, wandb, trackio or mlflow; may be repeated.")
    ] = None
    adapter: Annotated[str, typer.Option(help=f"What follows the network: {', '.join(ADAPTERS)}.")] = "auto"
    allow_wire: Annotated[
        list[WireFormat] | None, typer.Option(help="With --adapter auto: what slow cuts may be rounded to.")
    ] = None
    staleness: Annotated[
        int, typer.Option(help="1: steps overlap, with weights one step old (docs/staleness.md).", min=0, max=1)
    ] = 0
    json_: Json = False
    no_network: NoNetwork = False
    network_trace: NetworkTraceName = None
    listen: Listen = None
    lost_after: LostAfter = None
    insecure: Insecure = False

    def job(self, *, adapter_given: bool) -> TrainJob:
        """Return how to train; where steps overlap, no adapter follows the network unless one was asked for.

        Raises:
            ConfigError: a value is wrong, or two contradict each other.
        """
        values = {name: getattr(self, name) for name in JOB_OPTIONS}
        values["max_grad_norm"] = self.max_grad_norm or None
        values["allow_wire"] = tuple(dict.fromkeys(self.allow_wire or ()))
        if self.staleness and not adapter_given:
            values["adapter"] = "off"
        try:
            return TrainJob(steps=self.steps, **values)
        except ValueError as error:
            raise ConfigError(str(error)) from None
