"""What a run says of itself as it goes: steps, evaluations and checkpoints, a line each in its folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from spantrain.config.files.json_codec import to_json
from spantrain.config.files.text_files import write_atomically
from spantrain.core.checkpoint import SampleLedger
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.errors import ConfigError
from spantrain.runtime.coordinator.barrier import StepOutcome
from spantrain.runtime.gradients.optimizer import learning_rate

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One step that has ended."""

    step: int
    """Steps done, this one included."""
    loss: float
    """Mean over the global batch, before this step's update."""
    learning_rate: float
    grad_norm: float
    """Norm of all parameters' gradients, before clipping; 0 where the update was skipped."""
    step_s: float
    samples_per_s: float
    tokens_per_s: float | None = None
    """Of models that read tokens, all that are read, padding among them."""
    epoch: float | None = None
    """Samples trained on, over those of the data set; None where nobody knows how many it has."""
    skipped: bool = False
    """Under float16: gradients overflowed, so nothing was updated and the loss scale was lowered."""

    def scalars(self) -> dict[str, float]:
        """Return what is logged, by the names of the transformers library's trainer."""
        found = {
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "learning_rate": self.learning_rate,
            "epoch": self.epoch,
            "samples_per_second": self.samples_per_s,
            "tokens_per_second": self.tokens_per_s,
        }
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class EvaluationMetrics:
    """One evaluation on held-out data."""

    step: int
    """Steps done before it."""
    eval_loss: float
    """Mean over held-out samples: a batch of them, or all of a data set in this process."""
    epoch: float | None = None
    more: Mapping[str, float] = field(default_factory=dict)
    """What a function of the user's makes of outputs and labels, and what it took: names begin with `eval_`."""

    def scalars(self) -> dict[str, float]:
        """Return what is logged, by the names of the transformers library's trainer."""
        epoch = {} if self.epoch is None else {"epoch": self.epoch}
        return {"eval_loss": self.eval_loss, **self.more, **epoch}


@dataclass(frozen=True, kw_only=True)
class Counting:
    """What makes metrics of what the barrier knows of a step."""

    job: TrainJob
    plan: Plan
    ledger: SampleLedger
    dataset_size: int | None
    """Samples of the data set, where this process has it."""

    def step(self, outcome: StepOutcome, tokens: int | None) -> StepMetrics:
        """Return a step's metrics; `tokens` of its batch, if they are known."""
        assert outcome.loss is not None, "a step has a loss, an evaluation alone has none"
        size, length = self.plan.global_batch, self.plan.model.sequence_length
        tokens = size * length if tokens is None and length is not None else tokens
        return StepMetrics(
            step=outcome.step + 1,
            loss=outcome.loss,
            learning_rate=learning_rate(self.job, outcome.step),
            grad_norm=outcome.grad_norm,
            step_s=outcome.duration_s,
            samples_per_s=size / outcome.duration_s,
            tokens_per_s=None if tokens is None else tokens / outcome.duration_s,
            epoch=self.epoch(outcome, outcome.step + 1),
            skipped=outcome.skipped,
        )

    def evaluation(self, outcome: StepOutcome) -> EvaluationMetrics:
        """Return the metrics of the evaluation before a step, or behind the last one."""
        assert outcome.evaluation_loss is not None, "it was evaluated"
        return EvaluationMetrics(
            step=outcome.step, eval_loss=outcome.evaluation_loss, epoch=self.epoch(outcome, outcome.step)
        )

    def epoch(self, outcome: StepOutcome, steps_done: int) -> float | None:
        """Return how often the data set was trained on after so many steps; None where nobody knows its size."""
        size = self.dataset_size or outcome.dataset_size
        return self.ledger.samples_before(steps_done) / size if size else None


class MetricsFile:
    """Appends lines to a run's `metrics.jsonl`, each at once; a context."""

    def __init__(self, folder: Path, *, first_step: int, before: Path | None) -> None:
        """Begin the file with what an earlier run wrote of the steps that are kept.

        Args:
            folder: of the run.
            first_step: steps done before this run; those behind them are done again, and their lines are left out.
            before: folder of the run that goes on; None: a new one.
        """
        self._path = folder / METRICS_FILE
        self._kept = [] if before is None else _lines(before / METRICS_FILE, first_step)
        self._file: IO[str] | None = None
        self.evaluations = [_evaluation(line) for line in map(json.loads, self._kept) if _is_evaluation(line)]
        """What is kept of the earlier run's."""

    def __enter__(self) -> "MetricsFile":
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, "".join(self._kept))
        try:
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be written: {error.strerror}; choose another folder") from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def step(self, metrics: StepMetrics) -> None:
        """Write a step's line."""
        self._write("step", _fields(metrics))

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        """Write an evaluation's line."""
        fields = _fields(metrics)
        more = fields.pop("more")
        self._write("evaluation", fields | more)

    def checkpoint(self, step: int, folder: str) -> None:
        """Write a checkpoint's line, when it is complete."""
        self._write("checkpoint", {"step": step, "folder": folder})

    def _write(self, event: str, fields: dict[str, Any]) -> None:
        assert self._file is not None, "it is open"
        self._file.write(json.dumps({"event": event, **fields}, ensure_ascii=False) + "\n")
        self._file.flush()


def _fields(metrics: StepMetrics | EvaluationMetrics) -> dict[str, Any]:
    return {name: value for name, value in to_json(metrics).items() if value is not None and value is not False}


def _is_evaluation(line: Mapping[str, Any]) -> bool:
    numbers = (value for name, value in line.items() if name != "event")
    return line.get("event") == "evaluation" and "eval_loss" in line and all(type(n) in (int, float) for n in numbers)


def _evaluation(line: Mapping[str, Any]) -> EvaluationMetrics:
    own = {name: line[name] for name in ("step", "eval_loss", "epoch") if name in line}
    return EvaluationMetrics(
        **own, more={name: value for name, value in line.items() if name != "event" and name not in own}
    )


def _lines(path: Path, steps_done: int) -> list[str]:
    """Return the lines up to so many steps; one that was cut off in the middle is none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    kept = []
    for line in text.splitlines(keepends=True):
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if type(step) is int and step <= steps_done and line.endswith("\n"):
            kept.append(line)
    return kept
