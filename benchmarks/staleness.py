"""What weights one step old do to the loss: `benchmarks/staleness.py [--rate 1] [--seeds 3] [--models NAME ...]`.

Each model is trained twice from the same weights, with the same samples and learning rates, in one process and one
thread: exactly, and by the rule of `schedule.dispatch.policies` (the gradients of step t are of V_t, which are the
weights before the last update, and V_{t+2} is the update of V_{t+1} by them). Any plan's losses with `--staleness 1`
are those of the second run (tests/runtime/test_stale.py). Also: after how many steps each has got to the losses that
the exact run passes, at ten levels; by the mean of the last ten losses.

`--rate` is a factor on all learning rates. Emulated: nothing. Real: computation, losses. Writes its table, plot and
JSON to `benchmarks/results/`.
"""

import argparse
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from results import line_plot, save
from spantrain.core.job import TrainJob
from spantrain.core.span import Span
from spantrain.models.build import build_units
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.data.dataset import open_dataset
from spantrain.models.units import LABELS, loss_of, rows_read
from spantrain.runtime.gradients.optimizer import build_optimizer, clip_factor, learning_rate
from spantrain.runtime.step.work import SampledFeed

MODELS = {"gpt2-tiny": 1e-3, "efficientnet-tiny": 1e-3}
"""With their learning rates, behind the warm-up; falling to 0 at the end."""
EXACT, OLD = "exact", "one step old"
SMOOTHED, LEVELS, HELD_OUT_SAMPLES = 10, 10, 128


@dataclass(frozen=True, kw_only=True)
class Losses:
    """What came out of one run."""

    training: list[float]
    held_out: float

    def smoothed(self) -> list[float]:
        """Return the means of the last losses at each step."""
        return [statistics.mean(self.training[max(0, k - SMOOTHED + 1) : k + 1]) for k in range(len(self.training))]


class Trained:
    """A model in one process."""

    def __init__(self, model: str, job: TrainJob, batch: int) -> None:
        torch.set_num_threads(1)
        self._spec, self._job, self._whole = resolve_model(model), job, Span(0, batch)
        self._units = build_units(self._spec, seed=job.seed)
        self._parameters = list({id(own): own for unit in self._units for own in unit.parameters()}.values())
        self._optimizer = build_optimizer(job, self._parameters)
        self._feed = SampledFeed(open_dataset(self._spec), global_batch=batch, seed=job.seed)

    def run(self, *, old: bool) -> Losses:
        """Train all steps, exactly or with weights that are one step old."""
        before = self._copied()
        losses = []
        for step in range(self._job.steps):
            newest = self._copied()
            if old:
                self._load(before)
            losses.append(self._backward(step))
            self._load(newest)
            before = newest
            self._update(step)
        return Losses(training=losses, held_out=self._held_out())

    def _copied(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def _load(self, weights: list[torch.Tensor]) -> None:
        torch._foreach_copy_(self._parameters, weights)

    def _backward(self, step: int) -> float:
        self._optimizer.zero_grad(set_to_none=True)
        loss = loss_of(self._units, self._feed.rows(step, self._whole, rows_read(self._units)))
        (loss / self._whole.size).backward()
        return float(loss.detach()) / self._whole.size

    def _update(self, step: int) -> None:
        gradients = [own.grad for own in self._parameters if own.grad is not None]
        norm = float(nn.utils.get_total_norm(gradients))
        torch._foreach_mul_(gradients, clip_factor(norm, self._job.max_grad_norm))
        self._optimizer.param_groups[0]["lr"] = learning_rate(self._job, step)
        self._optimizer.step()

    @torch.no_grad()
    def _held_out(self) -> float:
        data = open_dataset(self._spec, held_out=True)
        count = min(HELD_OUT_SAMPLES, len(data))
        chosen = [number * len(data) // count for number in range(count)]
        return (
            float(loss_of(self._units, {**dict(enumerate(data.inputs(chosen))), LABELS: data.labels(chosen)})) / count
        )


def steps_more(exact: list[float], old: list[float]) -> list[float | None]:
    """Return at each level how many times as many steps the second needed; None where it never got there."""
    ends = statistics.mean(exact[: 2 * SMOOTHED]), exact[-1]
    levels = [ends[0] + (ends[1] - ends[0]) * (k + 1) / LEVELS for k in range(LEVELS)]
    ratios: list[float | None] = []
    for level in levels:
        first, second = (next((k + 1 for k, loss in enumerate(one) if loss <= level), None) for one in (exact, old))
        ratios.append(second / first if first and second else None)
    return ratios


def table_of(model: str, runs: dict[str, list[Losses]]) -> tuple[list[str], dict[str, Any]]:
    """Return a model's lines of the table, and the same as data."""
    lines, data = [], {}
    base = runs[EXACT]
    for name, own in runs.items():
        held = statistics.mean(run.held_out for run in own)
        last = statistics.mean(run.smoothed()[-1] for run in own)
        by_seed = [run.held_out / other.held_out - 1 for run, other in zip(own, base, strict=True)]
        data[name] = {"held_out": held, "training": last, "over_exact_by_seed": by_seed}
        told = " ".join(f"{100 * part:+.2f}" for part in by_seed)
        over = 100 * (held / statistics.mean(run.held_out for run in base) - 1)
        lines.append(f"{model:18} {name:13} {held:9.4f} {over:+8.2f} %   {told:22} {last:9.4f}")
    ratios = [
        ratio
        for one, other in zip(base, runs[OLD], strict=True)
        for ratio in steps_more(one.smoothed(), other.smoothed())
    ]
    reached = [ratio for ratio in ratios if ratio is not None]
    data["steps"] = {"mean": statistics.mean(reached), "levels": len(ratios), "reached": len(reached)}
    lines.append(
        f"{model:18} steps to the same loss: {statistics.mean(reached):.3f} times as many in the mean over "
        f"{len(reached)} of {len(ratios)} levels ({min(reached):.3f} to {max(reached):.3f})"
    )
    return lines, data


def main() -> None:
    """Train, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    options = parser.parse_args()
    head = f"{'model':18} {'weights':13} {'held out':>9} {'over exact':>10}   {'by seed, %':22} {'training':>9}"
    table = [
        f"{options.steps} steps of {options.batch} samples, AdamW, rates times {options.rate:g}, {options.seeds} seeds",
        "",
        head,
    ]
    data: dict[str, Any] = {"emulated": "nothing", "setting": vars(options)}
    lines: dict[str, list[tuple[float, float]]] = {}
    for model in options.models:
        runs = trained(model, options)
        found, data[model] = table_of(model, runs)
        data[model]["runs"] = {name: [asdict(run) for run in own] for name, own in runs.items()}
        table += found
        for name, own in runs.items():
            means = [statistics.mean(losses) for losses in zip(*(run.smoothed() for run in own), strict=True)]
            lines[f"{model}, {name}"] = [(float(step), loss) for step, loss in enumerate(means)]
        plot = line_plot(lines, title="Training loss, mean over seeds and ten steps", across="steps", up="loss")
        save("staleness" if options.rate == 1.0 else f"staleness_rate_{options.rate:g}", table, data, plot)
    print("\n".join(table))


def trained(model: str, options: argparse.Namespace) -> dict[str, list[Losses]]:
    """Train a model both ways with each seed."""
    runs: dict[str, list[Losses]] = {EXACT: [], OLD: []}
    for seed in range(options.seeds):
        job = TrainJob(
            steps=options.steps,
            seed=seed,
            learning_rate=options.rate * MODELS.get(model, 1e-3),
            lr_schedule="linear",
            decay_steps=options.steps,
        )
        for name, own in runs.items():
            begun_s = time.monotonic()
            own.append(Trained(model, job, options.batch).run(old=name == OLD))
            took_s = time.monotonic() - begun_s
            print(f"{model} seed {seed} {name:13} held out {own[-1].held_out:.4f} ({took_s:.0f} s)", flush=True)
    return runs


if __name__ == "__main__":
    main()
