"""What a use case tells the person who waits, and TensorBoard; the CLI draws it, tests collect it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from spantrain.core.plan import Plan
from spantrain.errors import ConfigError
from spantrain.runtime.coordinator.barrier import StepOutcome


class Reporter(Protocol):
    """Hears of progress; never decides anything."""

    def phase(self, text: str) -> None:
        """Say that a new part of the work begins."""

    def progress(self, done: int, total: int, text: str) -> None:
        """Say how far the present part is."""

    def run_begins(self, plan: Plan) -> None:
        """Say which plan the steps to come belong to."""

    def step(self, outcome: StepOutcome, total_steps: int) -> None:
        """Say that a training step has ended."""

    def saved(self, folder: str) -> None:
        """Say that a checkpoint is complete."""

    def note(self, text: str) -> None:
        """Say something that should stay to be read."""


class SilentReporter:
    """Says nothing."""

    def phase(self, text: str) -> None:
        """Say nothing."""

    def progress(self, done: int, total: int, text: str) -> None:
        """Say nothing."""

    def run_begins(self, plan: Plan) -> None:
        """Say nothing."""

    def step(self, outcome: StepOutcome, total_steps: int) -> None:
        """Say nothing."""

    def saved(self, folder: str) -> None:
        """Say nothing."""

    def note(self, text: str) -> None:
        """Say nothing."""


class ScalarWriter:
    """Writes the tags that users of other trainers know; does nothing without a folder."""

    def __init__(self, folder: Path | None) -> None:
        self._writer = None
        if folder is None:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("--tensorboard needs TensorBoard; run: pip install 'spantrain[tensorboard]'") from error
        self._writer = SummaryWriter(str(folder))

    def write(self, outcome: StepOutcome, global_batch: int, bytes_per_s: Mapping[str, float]) -> None:
        """Write one step's scalars; `bytes_per_s` of the links that follow a trace."""
        if self._writer is None:
            return
        if outcome.evaluation_loss is not None:
            self._writer.add_scalar("loss_metrics/heldout_loss", outcome.evaluation_loss, outcome.step)
        if outcome.loss is None:
            return
        self._writer.add_scalar("loss_metrics/global_avg_loss", outcome.loss, outcome.step)
        self._writer.add_scalar("grad_norm", outcome.grad_norm, outcome.step)
        self._writer.add_scalar("throughput(samples_per_s)", global_batch / outcome.duration_s, outcome.step)
        for link, rate in bytes_per_s.items():
            self._writer.add_scalar(f"link_rate(bytes_per_s)/{link}", rate, outcome.step)
        for name, busy_s in outcome.busy_s.items():
            self._writer.add_scalar(f"bubble_ratio/{name}", max(0.0, 1.0 - busy_s / outcome.duration_s), outcome.step)

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()
