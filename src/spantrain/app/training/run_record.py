"""What a run's folder says of the run that has ended: its record; read without torch."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import field
from pathlib import Path

from spantrain.config import artefacts
from spantrain.core.records import Record
from spantrain.core.update.optimizers import STATE_COPIES
from spantrain.errors import ConfigError, UsageError

RUN_FILE = "run.json"
TRACE_FILE = "trace.json"
DECISIONS_FILE = "decisions.jsonl"


class RunRecord(Record):
    """What was run, and medians over its steady steps (warm-up and evaluations left out)."""

    plan: str
    """Name of the plan's file in the run's folder; of several, the last one that ran."""
    profile: str
    """Name of the profile's file in the run's folder, or its path from there."""
    optimizer: str
    """As `cost.memory` names it."""
    steps_measured: int
    """How many steps the figures are of; at most the last 200."""
    step_s: float
    slowest_step_s: float
    fastest_step_s: float
    busy_s: Mapping[str, float] = field(default_factory=dict)
    peak_held_samples: Mapping[str, int] = field(default_factory=dict)
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    """By device: the most that its tensors held at once (`runtime.worker.plan_part`)."""
    first_step: int = 0
    """Under the plan."""
    earlier_plans: tuple[str, ...] = ()
    """Names of the files of the plans that ran before it, in order."""
    staleness: int = 0
    """How many steps old weights were: 1 where steps overlapped."""
    weights: str = ""
    """What the run began with, if that is not as ever."""
    left_out: tuple[str, ...] = ()
    """What of the model as it was given was not done, a line each."""
    losses: tuple[float | None, ...] = ()
    """Of every step since the first, those before a resume included; None where it was not finite."""

    def __post_init__(self) -> None:
        if self.optimizer not in STATE_COPIES:
            raise ValueError(f"optimizer must be one of {', '.join(STATE_COPIES)}, got {self.optimizer!r}")
        if self.steps_measured < 1 or not 0 < self.fastest_step_s <= self.step_s <= self.slowest_step_s:
            raise ValueError(
                f"a run has steps, the median between the fastest and the slowest; got {self.steps_measured} steps of "
                f"{self.fastest_step_s}, {self.step_s} and {self.slowest_step_s} s"
            )
        if self.staleness not in (0, 1):
            raise ValueError(f"staleness must be 0 or 1, got {self.staleness}")


def read_run_record(folder: Path) -> RunRecord | None:
    """Return the record of a run's folder; None where there is none.

    Raises:
        ConfigError: it is something else, or wrong.
    """
    path = folder / RUN_FILE
    return artefacts.read_artefact(RunRecord, artefacts.RUN_FORMAT, path) if path.exists() else None


def files_of_run(folder: Path) -> tuple[str, ...]:
    """Return the plans and the profile that a run in this folder was made with, as its record names them."""
    record = sound_record(folder)
    return (record.plan, *record.earlier_plans, record.profile) if record else ()


def sound_record(folder: Path) -> RunRecord | None:
    """Return the same; None where there is none that can be read."""
    with suppress(UsageError):
        return read_run_record(folder)
    return None


def check_not_of_a_run(path: Path, option: str) -> None:
    """Refuse to replace a plan or a profile that a run was made with: it is read to go on with it, and to validate it.

    Raises:
        ConfigError: it is one.
    """
    if path.name in files_of_run(path.parent):
        raise ConfigError(
            f"{option} {path}: the run in {path.parent} was made with it, and reads it to go on; name another place"
        )
