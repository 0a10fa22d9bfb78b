"""What is said of a plan to people, and what it was made from."""

from collections.abc import Mapping

from spantrain.core.records import Record


class Prediction(Record):
    """What a plan should do."""

    step_s: float
    samples_per_s: float
    peak_bytes: Mapping[str, int]
    """By device."""
    method: str
    """How it was predicted."""


class Alternative(Record):
    """Another way that was looked at, for the comparison that every plan is shown with (DESIGN idea 6)."""

    name: str
    devices: tuple[str, ...]
    step_s: float | None
    """None where it cannot run."""
    samples_per_s: float | None
    reason: str


class PlanReport(Record):
    """What is said of a plan to people: nothing runs by it."""

    prediction: Prediction | None = None
    alternatives: tuple[Alternative, ...] = ()
    """The other ways that were looked at."""
    reasons: tuple[str, ...] = ()
    """Why this one was chosen."""


class ProfileReference(Record):
    """The profile that a plan was made from."""

    path: str
    """Relative to the plan's own folder."""
    sha256: str
