"""Which checkpoint of a run is the best by its evaluations: the transformers library's rules."""

from dataclasses import dataclass, field
from pathlib import Path

from spantrain.app.metrics import EvaluationMetrics
from spantrain.errors import ConfigError
from spantrain.runtime.checkpoint.manifest import MANIFEST_FILE, step_of
from spantrain.runtime.checkpoint.saver import CHECKPOINTS, step_folder


@dataclass(kw_only=True)
class BestCheckpoint:
    """Hears of evaluations and checkpoints; which of the two of a step comes first makes no difference.

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

    def went_before(self, run: Path, evaluations: list[EvaluationMetrics]) -> None:
        """Hear what a run has evaluated that goes on, of the checkpoints that are in its folder."""
        for metrics in evaluations:
            folder = step_folder(run / CHECKPOINTS, metrics.step)
            if self.metric in metrics.scalars() and (folder / MANIFEST_FILE).is_file():
                self.saved(metrics.step, str(folder))
                self.evaluated(metrics)
