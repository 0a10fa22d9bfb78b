"""The options of `spantrain train` that no other command has."""

from pathlib import Path
from typing import Annotated

import typer

from spantrain.cli.options import MAX_SAMPLES
from spantrain.core.job import ADAPTERS, LARGEST_NUMBER
from spantrain.formats.registry import WireFormat
from spantrain.schedule.registry import own_schedules

PlanPath = Annotated[Path | None, typer.Argument(help="What `spantrain plan` wrote.")]
Model = Annotated[str | None, typer.Option(help="Without a plan: measure, plan and train this model.")]
GlobalBatch = Annotated[int, typer.Option(help="With --model: samples per optimizer step.", min=1, max=MAX_SAMPLES)]
FromScratch = Annotated[
    bool, typer.Option("--from-scratch", help="Random weights, though the folder of an hf: model has some.")
]
Steps = Annotated[int, typer.Option(help="Steps in all, those before a resume included.", min=1, max=LARGEST_NUMBER)]
RunFolder = Annotated[Path | None, typer.Option("--out", help="Folder of the run; made when missing.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Remove the run that --out holds, and nothing else.")]
ResumeRun = Annotated[Path | None, typer.Option(help="Folder of an earlier run: go on from its checkpoint.")]
OtherPlan = Annotated[Path | None, typer.Option("--plan", help="With --resume: go on under this plan.")]
Schedule = Annotated[
    str | None, typer.Option(help=f"{', '.join(own_schedules())}, or a package's; default: the plan's.")
]
Optimizer = Annotated[str, typer.Option(help="adamw or sgd.")]
LearningRate = Annotated[float, typer.Option(help="After the warm-up.")]
LrSchedule = Annotated[str, typer.Option(help="constant; cosine or linear: down to zero at --decay-steps.")]
WarmupSteps = Annotated[int, typer.Option(help="Steps of linear warm-up.")]
DecaySteps = Annotated[int, typer.Option(help="Where cosine and linear end.")]
WeightDecay = Annotated[float, typer.Option(help="Of the optimizer.")]
MaxGradNorm = Annotated[float, typer.Option(help="Clip to this global norm; 0: do not clip.")]
Seed = Annotated[int, typer.Option(help="Of weights and data order.")]
CheckpointEvery = Annotated[int, typer.Option(help="Steps between checkpoints; 0: only at the end.")]
KeepCheckpoints = Annotated[int, typer.Option(help="So many stay, the newest.", min=1)]
EvaluateEvery = Annotated[int, typer.Option(help="Steps between held-out evaluations; 0: never.")]
TraceSteps = Annotated[int, typer.Option(help="The last so many steps go into trace.json.")]
Tensorboard = Annotated[Path | None, typer.Option(help="Write TensorBoard scalars to this folder.")]
Adapter = Annotated[str, typer.Option(help=f"What follows the network: {', '.join(ADAPTERS)}.")]
Staleness = Annotated[
    int, typer.Option(help="1: steps overlap, with weights one step old (docs/staleness.md).", min=0, max=1)
]
AllowWire = Annotated[
    list[WireFormat] | None, typer.Option(help="With --adapter auto: what slow cuts may be rounded to.")
]
