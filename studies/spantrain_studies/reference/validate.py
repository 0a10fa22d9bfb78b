"""Compare our cost model and event engine with measured runs of others: a folder in, predictions and errors out."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from spantrain_studies.reference.costs import ByteParts, CasePrediction, TimeParts, predict_case
from spantrain_studies.reference.fit import fitted, left_out
from spantrain_studies.reference.folder import MEASURED_FILE, read_reference
from spantrain_studies.reference.platform import Platform, load_platform
from spantrain_studies.reference.types import ReferenceCase

PLATFORM = "megatron-deepspeed"
"""What the runs were trained with, unless said otherwise."""

_EXCLUDED_BY_FLAG = (
    ("invalid", ("time", "memory")),
    ("suspect memory", ("memory",)),
    ("suspect time", ("time",)),
    ("suspect:", ("time", "memory")),
    ("red_grads", ()),
)
"""How a flag begins, and the figures that are not to be used then; what begins otherwise excludes both."""


@dataclass(frozen=True, kw_only=True)
class CaseValidation:
    """One run, predicted and measured."""

    id: str
    predicted_s: float
    measured_s: float
    predicted_bytes: int
    measured_bytes: float
    excluded: tuple[str, ...]
    """`time`, `memory`: measured figures that the folder says not to use, so they count in no error."""
    flags: tuple[str, ...]
    """What the folder says of its figures."""
    longest: str
    """The stage that works longest, whose seconds `time_parts` divides."""
    time_parts: TimeParts
    fullest: str
    """The stage whose device holds the most, which `byte_parts` divides."""
    byte_parts: ByteParts
    estimated_head: bool

    @property
    def time_error_ratio(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted_s / self.measured_s - 1.0

    @property
    def memory_error_ratio(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted_bytes / self.measured_bytes - 1.0


@dataclass(frozen=True, kw_only=True)
class SetValidation:
    """The runs of one set. Errors are parts of one; None where no figure counts."""

    cases: tuple[CaseValidation, ...]
    time_mape: float | None
    """Mean absolute error."""
    time_max_ape: float | None
    memory_mape: float | None
    memory_max_ape: float | None


@dataclass(frozen=True, kw_only=True)
class ReferenceValidation:
    """A folder of measured runs."""

    platform: Platform
    """Where runs were left out: as fitted to all of them."""
    left_out: bool
    """Whether each run was predicted by constants that were fitted to all others."""
    sets: Mapping[str, SetValidation]


def holds_reference(folder: Path) -> bool:
    """Whether a folder holds measured runs of others, and not a run of ours."""
    return (folder / MEASURED_FILE).exists()


def excluded_figures(flags: tuple[str, ...]) -> tuple[str, ...]:
    """Return the figures of a run that its flags say not to use: `time`, `memory`, both or none.

    >>> excluded_figures(("suspect memory: too small",)), excluded_figures(("suspect: a copy",)), excluded_figures(())
    (('memory',), ('time', 'memory'), ())
    """
    found: set[str] = set()
    for flag in flags:
        known = (figures for start, figures in _EXCLUDED_BY_FLAG if flag.startswith(start))
        found.update(next(known, ("time", "memory")))
    return tuple(figure for figure in ("time", "memory") if figure in found)


def validate_reference(
    folder: Path,
    *,
    platform: Platform | None = None,
    leave_one_out: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> ReferenceValidation:
    """Predict every run of a folder and compare.

    Args:
        folder: with measured.json.
        platform: whose constants to use; None: those that ship.
        leave_one_out: fit the constants to this folder, for each run without it.
        progress: hears of runs done, of all, and of the next one.

    Raises:
        ConfigError: a file of the folder is missing or wrong.
        ProfileError: what a run needs was not measured.
    """
    reference = read_reference(folder)
    used = load_platform(PLATFORM) if platform is None else platform
    by_run: dict[str, Platform] = {}
    if leave_one_out:
        by_run = left_out(reference, used, _excluded)
        used = fitted(reference, used, _excluded)
    rows: dict[str, list[CaseValidation]] = {}
    for number, case in enumerate(reference.cases):
        if progress is not None:
            progress(number, len(reference.cases), case.id)
        predicted = predict_case(reference, case, by_run.get(case.id, used))
        rows.setdefault(case.set_name, []).append(_compared(case, predicted))
    sets = {name: _set(cases) for name, cases in rows.items()}
    return ReferenceValidation(platform=used, left_out=leave_one_out, sets=sets)


def _excluded(case: ReferenceCase) -> tuple[str, ...]:
    return excluded_figures(case.flags)


def _compared(case: ReferenceCase, predicted: CasePrediction) -> CaseValidation:
    return CaseValidation(
        id=case.id,
        predicted_s=predicted.step_s,
        measured_s=case.step_s,
        predicted_bytes=predicted.peak_bytes,
        measured_bytes=case.peak_bytes,
        excluded=excluded_figures(case.flags),
        flags=case.flags,
        longest=predicted.longest,
        time_parts=predicted.time,
        fullest=predicted.fullest,
        byte_parts=predicted.memory,
        estimated_head=predicted.estimated_head,
    )


def _set(cases: list[CaseValidation]) -> SetValidation:
    times = [abs(case.time_error_ratio) for case in cases if "time" not in case.excluded]
    sizes = [abs(case.memory_error_ratio) for case in cases if "memory" not in case.excluded]
    return SetValidation(
        cases=tuple(cases),
        time_mape=statistics.fmean(times) if times else None,
        time_max_ape=max(times, default=None),
        memory_mape=statistics.fmean(sizes) if sizes else None,
        memory_max_ape=max(sizes, default=None),
    )
