"""Print how many steps training needs to a target loss: over several places, and in one process with plain torch.

python benchmarks/convergence.py [--steps 60] [--models gpt2-tiny resnet-tiny]

Each model is trained twice with the same weights, samples, optimizer and learning rates: in one process, whole batches
through the unsplit model by plain autograd; and by `spantrain train` under the plan of `auto` for the `laptop` preset
(six emulated devices in three places, zero-bubble pipeline). The target is what one process has reached after five
sixths of its steps, by the mean of the last five losses, rounded up to two digits behind the point. So that no single
target is hit by chance, ten levels from the first losses down to it are counted, the target among them. The project's
bound: the same number of steps at each (the paper's scheme needed 6.4-8.2 % more).

As a control, one process trains once more with each batch summed in four parts: another order of sums, nothing else.
The learning rate is one at which that makes no difference. At the default of 3e-3 it does: gpt2-tiny leaves a plateau
at a moment that the last bits decide, two runs of one process are 0.2 apart in loss there, and what is exact cannot be
told from what is not.

Emulated: the devices' time. Real: computation, gradients, losses, messages, encryption. Links are unshaped while
training, as they have no part in the loss.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from results import line_plot, save
from spantrain.core.job import TrainJob
from spantrain.core.span import Span, equal_spans
from spantrain.models.build import build_units
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.data.dataset import open_dataset
from spantrain.models.units import UnitModule, loss_of, rows_read
from spantrain.runtime.gradients.optimizer import build_optimizer, clip_factor, learning_rate
from spantrain.runtime.step.work import SampledFeed

Lines = dict[str, list[tuple[float, float]]]

GLOBAL_BATCH = 32
SMOOTHED = 5
LEVELS, CONTROL_PARTS = 10, 4


def one_process(model: str, job: TrainJob, parts: int = 1) -> list[float]:
    """Train without any of the pipeline, each batch in so many parts; return the loss of each step."""
    spec = resolve_model(model)
    units = build_units(spec, seed=job.seed)
    parameters = list({id(parameter): parameter for unit in units for parameter in unit.parameters()}.values())
    optimizer = build_optimizer(job, parameters)
    feed = SampledFeed(open_dataset(spec), global_batch=GLOBAL_BATCH, seed=job.seed)
    losses = []
    for step in range(job.steps):
        losses.append(
            sum(_backward(units, feed, step, span) for span in equal_spans(GLOBAL_BATCH, GLOBAL_BATCH // parts))
        )
        with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
        norm = float(sum(parameter.grad.double().square().sum() for parameter in with_gradient) ** 0.5)
        for parameter in with_gradient:
            parameter.grad.mul_(clip_factor(norm, job.max_grad_norm))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(job, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return losses


def _backward(units: list[UnitModule], feed: SampledFeed, step: int, span: Span) -> float:
    loss = loss_of(units, feed.rows(step, span, rows_read(units))) / GLOBAL_BATCH
    loss.backward()
    return float(loss.detach())


def spread_over_places(model: str, job: TrainJob, folder: Path) -> tuple[list[float], str]:
    """Train by `spantrain`; return the loss of each step, and the plan's stages."""
    plan, run = folder / "plan.json", folder / "run"
    words = ("plan", "--preset", "laptop", "--model", model, "--global-batch", GLOBAL_BATCH, "--out", plan)
    subprocess.run([sys.executable, "-m", "spantrain", *map(str, words)], stdout=subprocess.DEVNULL, check=True)
    words = ("train", plan, "--steps", job.steps, "--seed", job.seed, "--learning-rate", job.learning_rate)
    words = (*words, "--no-network", "--json", "--out", run)
    said = subprocess.run([sys.executable, "-m", "spantrain", *map(str, words)], stdout=subprocess.PIPE, check=True)
    losses = json.loads(said.stdout)["losses"]
    stages = json.loads(plan.read_text())["stages"]
    devices = sum(len(replica["devices"]) for stage in stages for replica in stage["replicas"])
    return losses, f"{len(stages)} stages, {devices} devices"


def smoothed(losses: list[float]) -> list[float]:
    """Return the mean of the last few losses at each step."""
    return [statistics.fmean(losses[max(0, step + 1 - SMOOTHED) : step + 1]) for step in range(len(losses))]


def steps_to(losses: list[float], target: float) -> int | None:
    """Return the number of steps after which the smoothed loss is at the target; None if never."""
    return next((step + 1 for step, loss in enumerate(smoothed(losses)) if loss <= target), None)


def levels(losses: list[float], steps: int) -> list[float]:
    """Return losses from the first ones down to the target, evenly spaced."""
    first, target = smoothed(losses)[SMOOTHED - 1], math.ceil(100 * smoothed(losses)[steps * 5 // 6 - 1]) / 100
    return [first + (target - first) * level / LEVELS for level in range(1, LEVELS + 1)]


def compare(model: str, job: TrainJob) -> tuple[dict[str, Any], str, Lines]:
    """Train in all ways; return the figures, a line of the table, and lines to draw."""
    alone, control = one_process(model, job), one_process(model, job, CONTROL_PARTS)
    with tempfile.TemporaryDirectory() as folder:
        spread, plan = spread_over_places(model, job, Path(folder))
    runs = {"one process": alone, "summed otherwise": control, "spantrain": spread}
    goals = levels(alone, job.steps)
    needed = {name: [steps_to(losses, goal) for goal in goals] for name, losses in runs.items()}
    apart = {name: max(abs(a - b) for a, b in zip(alone, losses, strict=True)) for name, losses in runs.items()}
    same = sum(one == other for one, other in zip(needed["one process"], needed["spantrain"], strict=True))
    cells = ["never" if steps[-1] is None else f"{steps[-1]} steps" for steps in needed.values()]
    line = (
        f"{model:14} {goals[-1]:11.2f} {cells[0]:>12} {cells[1]:>17} {cells[2]:>10} {f'{same} of {LEVELS}':>14} "
        f"{apart['spantrain']:11.1e} {apart['summed otherwise']:17.1e}  {plan}"
    )
    row = {"levels": goals, "steps": needed, "same_at": same, "apart": apart, "plan": plan}
    drawn = {f"{model}, {name}": list(enumerate(runs[name])) for name in ("one process", "spantrain")}
    return row, line, drawn


def main() -> int:
    """Train, compare, print; return 1 if a model needs more steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--models", nargs="+", default=["gpt2-tiny", "resnet-tiny"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    job = TrainJob(steps=options.steps, seed=options.seed, learning_rate=options.learning_rate)
    table = [
        f"{'model':14} {'target loss':>11} {'one process':>12} {'summed otherwise':>17} {'spantrain':>10} "
        f"{'same at levels':>14} {'apart':>11} {'summed otherwise':>17}  plan"
    ]
    print(table[0], flush=True)
    rows: dict[str, dict[str, Any]] = {}
    lines: Lines = {}
    for model in options.models:
        rows[model], line, drawn = compare(model, job)
        lines |= drawn
        table.append(line)
        print(line, flush=True)
    good = all(row["same_at"] == LEVELS for row in rows.values())
    table.append(f"wanted: as many steps as one process: {'holds' if good else 'does not hold'}")
    print(table[-1])
    plot = line_plot(lines, title="Loss by step, one process and spread over three places", across="step", up="loss")
    save(
        "convergence",
        table,
        {"models": rows, "steps": job.steps, "learning_rate": job.learning_rate, "emulated": "devices' time"},
        plot,
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
