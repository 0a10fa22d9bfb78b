"""Print how many steps training needs to a target loss: over several places, and in one process with plain torch.

python benchmarks/convergence.py [--steps 60] [--models gpt2-tiny resnet-tiny]

Each model is trained twice with the same weights, samples, optimizer and learning rates: in one process, whole batches
through the unsplit model by plain autograd; and by `spantrain train` under the plan of `auto` for the `laptop` preset
(six emulated devices in three places, zero-bubble pipeline). The target is what one process has reached after five
sixths of its steps, by the mean of the last five losses, rounded up to two digits behind the point. The project's
bound: the same number of steps (the paper's scheme needed 6.4-8.2 % more).
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

import torch

from results import line_plot, save
from spantrain.core.job import TrainJob
from spantrain.core.spans import Span
from spantrain.models.build import build_units, parameter_names
from spantrain.models.catalog import resolve_model
from spantrain.models.data import open_dataset
from spantrain.runtime.feed import SampledFeed
from spantrain.runtime.optimizer import build_optimizer, clip_factor, learning_rate

GLOBAL_BATCH = 32
SMOOTHED = 5


def one_process(model: str, job: TrainJob) -> list[float]:
    """Train without any of the pipeline; return the loss of each step."""
    spec = resolve_model(model)
    units = build_units(spec, seed=job.seed)
    named = {full: unit.get_parameter(local) for unit in units for local, full in parameter_names(unit).items()}
    parameters = list({id(parameter): parameter for parameter in named.values()}.values())
    optimizer = build_optimizer(job, parameters)
    feed = SampledFeed(open_dataset(spec), global_batch=GLOBAL_BATCH, seed=job.seed)
    whole, losses = Span(0, GLOBAL_BATCH), []
    for step in range(job.steps):
        tensors = feed.inputs(step, whole)
        for unit in units[:-1]:
            tensors = unit(*tensors)
        loss = units[-1](*tensors, feed.labels(step, whole)) / GLOBAL_BATCH
        loss.backward()
        with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
        norm = float(sum(parameter.grad.double().square().sum() for parameter in with_gradient) ** 0.5)
        for parameter in with_gradient:
            parameter.grad.mul_(clip_factor(norm, job.max_grad_norm))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(job, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    return losses


def spread_over_places(model: str, job: TrainJob, folder: Path) -> tuple[list[float], str]:
    """Train by `spantrain`; return the loss of each step, and the plan's stages."""
    plan, run = folder / "plan.json", folder / "run"
    words = ("plan", "--preset", "laptop", "--model", model, "--global-batch", GLOBAL_BATCH, "--out", plan)
    subprocess.run([sys.executable, "-m", "spantrain", *map(str, words)], stdout=subprocess.DEVNULL, check=True)
    words = ("train", plan, "--steps", job.steps, "--seed", job.seed, "--no-network", "--json", "--out", run)
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


def main() -> int:
    """Train, compare, print; return 1 if a model needs more steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--models", nargs="+", default=["gpt2-tiny", "resnet-tiny"])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    job = TrainJob(steps=options.steps, seed=options.seed)
    table = [f"{'model':20} {'target loss':>11} {'one process':>12} {'spantrain':>10} {'largest difference':>19}  plan"]
    print(table[0], flush=True)
    rows, lines = {}, {}
    for model in options.models:
        alone = one_process(model, job)
        with tempfile.TemporaryDirectory() as folder:
            spread, plan = spread_over_places(model, job, Path(folder))
        target = math.ceil(100 * smoothed(alone)[options.steps * 5 // 6 - 1]) / 100
        needed = steps_to(alone, target), steps_to(spread, target)
        apart = max(abs(a - b) for a, b in zip(alone, spread, strict=True))
        cells = [f"{'never' if steps is None else f'{steps} steps'}" for steps in needed]
        table.append(f"{model:20} {target:11.2f} {cells[0]:>12} {cells[1]:>10} {apart:19.1e}  {plan}")
        print(table[-1], flush=True)
        rows[model] = {"target": target, "one_process_steps": needed[0], "spantrain_steps": needed[1], "apart": apart}
        lines |= {f"{model}, one process": list(enumerate(alone)), f"{model}, spantrain": list(enumerate(spread))}
    good = all(row["one_process_steps"] == row["spantrain_steps"] for row in rows.values())
    table.append(f"same number of steps: {'holds' if good else 'does not hold'}")
    print(table[-1])
    plot = line_plot(lines, title="Loss by step, one process and spread over three places", across="step", up="loss")
    save("convergence", table, {"models": rows, "steps": options.steps, "emulated": "devices' time"}, plot)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
