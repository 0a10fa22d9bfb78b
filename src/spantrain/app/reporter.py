"""What a use case tells the person who waits; the CLI draws it, tests collect it."""

from collections.abc import Mapping
from typing import Protocol

from spantrain.app.metrics import EvaluationMetrics, StepMetrics
from spantrain.core.plan import Plan
from spantrain.runtime.coordinator.barrier import StepOutcome


class Reporter(Protocol):
    """Hears of progress; never decides anything."""

    def phase(self, text: str) -> None:
        """Say that a new part of the work begins."""

    def progress(self, done: int, total: int, text: str) -> None:
        """Say how far the present part is."""

    def run_begins(self, plan: Plan, reason: str = "") -> None:
        """Say which plan the steps to come belong to, and why it has taken over from another one, if it has."""

    def step(self, outcome: StepOutcome, metrics: StepMetrics, total_steps: int) -> None:
        """Say that a training step has ended."""

    def evaluated(self, metrics: EvaluationMetrics) -> None:
        """Say what an evaluation on held-out data gave."""

    def logged(self, scalars: Mapping[str, float], step: int) -> None:
        """Say what is logged of the steps since the last time (`loss`: their mean), or of an evaluation."""

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

    def run_begins(self, plan: Plan, reason: str = "") -> None:
        """Say nothing."""

    def step(self, outcome: StepOutcome, metrics: StepMetrics, total_steps: int) -> None:
        """Say nothing."""

    def evaluated(self, metrics: EvaluationMetrics) -> None:
        """Say nothing."""

    def logged(self, scalars: Mapping[str, float], step: int) -> None:
        """Say nothing."""

    def saved(self, folder: str) -> None:
        """Say nothing."""

    def note(self, text: str) -> None:
        """Say nothing."""
