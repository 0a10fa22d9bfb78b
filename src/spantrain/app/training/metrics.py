"""What a run says of itself as it goes, of steps, evaluations and checkpoints: to its file, trackers, and who waits."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from math import nan
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from spantrain.app.reporter import Reporter
from spantrain.app.training.trackers import TrackedRun, Trackers, tagged
from spantrain.config.files.json_codec import to_json
from spantrain.config.files.text_files import write_atomically
from spantrain.core.checkpoint import SampleLedger
from spantrain.core.quantities import if_finite, mean_of_finite
from spantrain.core.records import Record
from spantrain.errors import ConfigError
from spantrain.runtime.checkpoint.manifest import MANIFEST_FILE, step_of
from spantrain.runtime.checkpoint.saver import CHECKPOINTS
from spantrain.runtime.checkpoint.tensor_file import step_folder
from spantrain.runtime.coordinator.barrier import StepOutcome
from spantrain.runtime.gradients.optimizer import learning_rate

if TYPE_CHECKING:
    from spantrain.app.training.requests import TrainRequest

METRICS_FILE = "metrics.jsonl"


class StepMetrics(Record):
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


class EvaluationMetrics(Record):
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


class MetricsFile:
    """Appends lines to a run's `metrics.jsonl`, each at once; a context."""

    def __init__(
        self, folder: Path, *, first_step: int, before: Path | None, tell: Callable[[str], None],
        losses: Sequence[float | None] = (),
    ) -> None:  # fmt: skip
        """Begin the file with what an earlier run wrote of the steps that are kept.

        Args:
            folder: of the run.
            first_step: steps done before this run; those behind them are done again, and their lines are left out.
            before: folder of the run that goes on; None: a new one.
            tell: hears once that lines cannot be written.
            losses: of steps done before; those without a line, as after the loss of a coordinator, get one of that.
        """
        self._path, self._tell = folder / METRICS_FILE, tell
        self._kept = [] if before is None else _with_steps(_lines(before / METRICS_FILE, first_step), losses)
        self._file: IO[str] | None = None
        self.evaluations = [found for line in map(json.loads, self._kept) if (found := _evaluation(line)) is not None]
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
            with suppress(OSError):  # that is told
                self._file.close()

    def write(self, event: str, line: StepMetrics | EvaluationMetrics | Mapping[str, Any]) -> None:
        """Write a line of a step, an evaluation or a checkpoint, with what is known; null: it is no finite number."""
        found = line if isinstance(line, Mapping) else asdict(line)
        fields = {name: value for name, value in found.items() if value is not None and value is not False}
        fields |= fields.pop("more", {})
        fields = {name: if_finite(value) if isinstance(value, float) else value for name, value in fields.items()}
        assert self._file is not None, "it is open"
        try:
            self._file.write(json.dumps({"event": event, **fields}, ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            self._tell(f"{self._path}: cannot be written: {error.strerror}; the run goes on, lines may be missing")
            self._tell = lambda _: None  # once


def _evaluation(line: dict[str, Any]) -> EvaluationMetrics | None:
    """Return what a line of a file says of an evaluation; None if it says something else."""
    event = line.pop("event", None)
    line = {name: nan if value is None else value for name, value in line.items()}
    if event != "evaluation" or "eval_loss" not in line or any(type(n) not in (int, float) for n in line.values()):
        return None
    own = {name: line.pop(name) for name in ("step", "eval_loss", "epoch") if name in line}
    return EvaluationMetrics(**own, more=line)


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


def _with_steps(lines: list[str], losses: Sequence[float | None]) -> list[str]:
    """Return lines, and one with the loss of each step that has none."""
    known = {(found["event"], found["step"]) for found in map(json.loads, lines) if "event" in found}
    more = [
        json.dumps({"event": "step", "step": step, "loss": loss}) + "\n"
        for step, loss in enumerate(losses, 1)
        if ("step", step) not in known
    ]
    return sorted(more + lines, key=lambda line: int(json.loads(line)["step"])) if more else lines


class RunLog:
    """Hears of a run's steps, evaluations and checkpoints; a context, from the first step to the last."""

    def __init__(self, request: "TrainRequest", ledger: SampleLedger, reporter: Reporter) -> None:
        resume, self._request, self._ledger, self._reporter = request.resume, request, ledger, reporter
        self._first_step = resume.content.step if resume else 0
        self._file = self._begun(self._first_step, resume.folder.parent.parent if resume else None)
        self.before = tuple(self._file.evaluations)
        """Evaluations of the run that goes on."""
        self._trackers: Trackers | None = None
        self._logged_step = self._first_step
        """Up to which scalars of steps were given: those of a step that is done again are not given twice."""
        self._unlogged: dict[int, float] = {}
        """Losses of steps since scalars were last given."""
        self.evaluations: list[EvaluationMetrics] = []
        """Of this run."""
        self.epoch: float | None = None
        """After the last step."""
        self._steps_done = 0

    def __enter__(self) -> Self:
        request = self._request
        request.best.went_before(request.out, self.before)
        run = TrackedRun(
            name=request.options.run_name or request.out.name,
            project=request.options.project,
            folder=request.out / "tensorboard",
            first_step=self._first_step,
            config={
                **to_json(request.job),
                "model": request.plan.model.name,
                "global_batch": request.plan.global_batch,
                "devices": len(request.plan.devices),
                "schedule": request.plan.schedule,
            },
        )
        self._trackers = Trackers(request.options.report_to, run, self._reporter.note)
        try:
            self._file.__enter__()
        except BaseException:
            self._trackers.close()
            raise
        if request.take_evaluations is not None:
            request.take_evaluations(self.evaluated)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        last = self._request.last_evaluation
        if kind is None and last is not None and self._steps_done == self._request.job.steps:
            self.evaluated(last())
        self._file.__exit__()
        if self._trackers is not None:
            self._trackers.close()

    def step(self, outcome: StepOutcome, link_rates: Mapping[str, float]) -> None:
        """Tell of what a barrier knows: an evaluation, a step, or one behind the other.

        Args:
            outcome: what is known.
            link_rates: bytes per second of the links that follow a trace.
        """
        if outcome.evaluation_loss is not None:  # made before the step, or behind the last one
            epoch = self._epoch_after(outcome.step, outcome)
            self._evaluated(EvaluationMetrics(step=outcome.step, eval_loss=outcome.evaluation_loss, epoch=epoch))
        if outcome.loss is not None:
            self._trained(outcome, outcome.loss, link_rates)

    def _begun(self, steps_done: int, before: Path | None) -> MetricsFile:
        request, losses = self._request, self._request.resume.losses if self._request.resume else ()
        tell = self._reporter.note
        return MetricsFile(request.out, first_step=steps_done, before=before, tell=tell, losses=losses[:steps_done])

    def go_back(self, steps_done: int) -> None:
        """Hear that later steps are done again; what devices evaluate there comes once more."""
        if steps_done >= self._steps_done:
            return
        self.evaluations = [found for found in self.evaluations if found.step < steps_done]
        self._unlogged = {step: loss for step, loss in self._unlogged.items() if step <= steps_done}
        try:
            begun = self._begun(steps_done, self._request.out).__enter__()
        except (OSError, ConfigError) as error:
            self._reporter.note(f"{error}; the run goes on, and has steps there twice")
            return
        self._file.__exit__()
        self._file = begun

    def saved(self, step: int, folder: str) -> None:
        """Tell of a checkpoint that is complete."""
        name = f"{Path(folder).parent.name}/{Path(folder).name}"
        self._file.write("checkpoint", {"step": step, "folder": name})
        self._request.best.saved(step, folder)
        self._reporter.saved(folder)

    def evaluated(self, metrics: EvaluationMetrics) -> None:
        """Tell of an evaluation that was made in this process, where steps wait for batches."""
        self._evaluated(replace(metrics, epoch=self.epoch))

    def _evaluated(self, metrics: EvaluationMetrics) -> None:
        self.evaluations.append(metrics)
        if any(metrics.step == before.step for before in self._file.evaluations):
            return  # a run that goes on begins with the evaluation that the one before it ended with
        self._file.write("evaluation", metrics)
        self._reporter.evaluated(metrics)
        self._request.best.evaluated(metrics)
        self._log(metrics.scalars(), metrics.step)

    def _epoch_after(self, steps_done: int, outcome: StepOutcome) -> float | None:
        """Return how often the data set was trained on after so many steps; None where nobody knows its size."""
        size = self._request.options.dataset_size or outcome.dataset_size
        return self._ledger.samples_before(steps_done) / size if size else None

    def _trained(self, outcome: StepOutcome, loss: float, link_rates: Mapping[str, float]) -> None:
        options, batches, plan = self._request.options, self._request.batches, self._request.plan
        total, size, length = self._request.job.steps, plan.global_batch, plan.model.sequence_length
        tokens = batches.tokens(outcome.step) if batches else None
        tokens = size * length if tokens is None and length is not None else tokens
        metrics = StepMetrics(
            step=outcome.step + 1,
            loss=loss,
            learning_rate=learning_rate(self._request.job, outcome.step),
            grad_norm=outcome.grad_norm,
            step_s=outcome.duration_s,
            samples_per_s=size / outcome.duration_s,
            tokens_per_s=None if tokens is None else tokens / outcome.duration_s,
            epoch=self._epoch_after(outcome.step + 1, outcome),
            skipped=outcome.skipped,
        )
        self.epoch, self._steps_done = metrics.epoch, metrics.step
        self._file.write("step", metrics)
        self._reporter.step(outcome, metrics, total)
        if not options.logging_steps or metrics.step <= self._logged_step:
            return
        self._unlogged[metrics.step] = metrics.loss
        if metrics.step % options.logging_steps == 0 or metrics.step == total:
            more = {f"link_bytes_per_second/{link}": rate for link, rate in link_rates.items()}
            more |= {
                f"bubble_ratio/{name}": max(0.0, 1.0 - busy_s / outcome.duration_s)
                for name, busy_s in outcome.busy_s.items()
            }
            self._log(metrics.scalars() | {"loss": mean_of_finite(self._unlogged.values())}, metrics.step, more)
            self._logged_step = metrics.step
            self._unlogged.clear()

    def _log(self, scalars: Mapping[str, float], step: int, more: Mapping[str, float] | None = None) -> None:
        assert self._trackers is not None, "it is open"
        self._trackers.log({**tagged(scalars), **tagged(more or {})}, step)
        self._reporter.logged(scalars, step)


@dataclass(kw_only=True)
class BestCheckpoint:
    """Which checkpoint of a run is the best by its evaluations: the transformers library's rules.

    It hears of evaluations and checkpoints; which of the two of a step comes first makes no difference.

    >>> best = BestCheckpoint()
    >>> for step, loss in ((0, 1.0), (2, 3.0), (4, 2.5), (6, 2.7)):
    ...     best.evaluated(EvaluationMetrics(step=step, eval_loss=loss))
    >>> best.saved(2, "checkpoint/step-2")
    >>> best.value, best.step, best.checkpoint
    (2.5, 4, None)
    >>> best.saved(4, "checkpoint/step-4")
    >>> best.checkpoint
    'checkpoint/step-4'
    """

    metric: str = "eval_loss"
    """Name among an evaluation's scalars."""
    greater_is_better: bool = False
    kept: bool = False
    """Whether the run keeps the best one's checkpoint, and ends with it."""
    value: float | None = None
    """The best so far; of what a run begins with nothing is counted."""
    step: int | None = None
    """Steps done when that was."""
    checkpoint: str | None = None
    """Folder of the newest checkpoint that was the best when its evaluation was known."""
    _folders: dict[int, str] = field(default_factory=dict)
    """Of all complete checkpoints, by steps done."""

    @property
    def kept_step(self) -> int | None:
        """Steps done in the checkpoint that is to be kept, if there is one."""
        return step_of(Path(self.checkpoint)) if self.kept and self.checkpoint else None

    def evaluated(self, metrics: EvaluationMetrics) -> None:
        """Hear of an evaluation.

        Raises:
            ConfigError: it has no such metric.
        """
        scalars = metrics.scalars()
        if self.metric not in scalars:
            raise ConfigError(
                f"metric_for_best_model {self.metric}: the evaluation has {', '.join(scalars)}; name one of them, or "
                "have compute_metrics return it"
            )
        value = scalars[self.metric]
        if metrics.step == 0 or value != value:
            return
        if self.value is None or (value > self.value if self.greater_is_better else value < self.value):
            self.value, self.step = value, metrics.step
            self.checkpoint = self._folders.get(metrics.step, self.checkpoint)

    def saved(self, step: int, folder: str) -> None:
        """Hear of a checkpoint that is complete."""
        self._folders[step] = folder
        if step == self.step:
            self.checkpoint = folder

    def went_before(self, run: Path, evaluations: Iterable[EvaluationMetrics]) -> None:
        """Hear what a run has evaluated that goes on, of the checkpoints that are in its folder."""
        for metrics in evaluations:
            folder = step_folder(run / CHECKPOINTS, metrics.step)
            if self.metric in metrics.scalars() and (folder / MANIFEST_FILE).is_file():
                self.saved(metrics.step, str(folder))
                self.evaluated(metrics)
