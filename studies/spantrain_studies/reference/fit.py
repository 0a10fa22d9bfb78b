"""A platform's constants from measured runs: least squares of relative errors, time and memory apart (no shared ones).

What counts is how far off a run is that the constants were not fitted on (`left_out`); constants that no run of the
rest tells stay as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from spantrain_studies.reference.costs import predict_case
from spantrain_studies.reference.platform import Platform
from spantrain_studies.reference.types import Reference, ReferenceCase

Vector = NDArray[np.float64]
_ROUNDS = 4
_STEP = 1e-3
_TELLING = 1e-6
"""Of the largest singular value: what moves errors less is not fitted."""


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """What is fitted to what."""

    figure: str
    """`time` or `memory`."""
    values: Vector
    """The constants, over about how large they are."""
    build: Callable[[Platform, Sequence[float]], Platform]
    error: Callable[[ReferenceCase, Platform], float]
    """Predicted over measured, less one."""


def fitted(reference: Reference, platform: Platform, excluded: Callable[[ReferenceCase], tuple[str, ...]]) -> Platform:
    """Return the platform with the constants that fit all runs best.

    Args:
        reference: the runs.
        platform: what is not fitted, and where to begin.
        excluded: the figures of a run that do not count, `time` or `memory`.
    """
    for fit in _fits(reference, platform):
        cases = [case for case in reference.cases if fit.figure not in excluded(case)]
        platform = fit.build(platform, _solve(fit, platform, cases).tolist()) if cases else platform
    return platform


def left_out(
    reference: Reference, platform: Platform, excluded: Callable[[ReferenceCase], tuple[str, ...]]
) -> dict[str, Platform]:
    """Return, by run, the platform fitted to all runs but that one."""
    best = fitted(reference, platform, excluded)
    found = {case.id: best for case in reference.cases}
    for fit in _fits(reference, best):
        cases = [case for case in reference.cases if fit.figure not in excluded(case)]
        if not cases:
            continue
        errors, slopes = _linear(fit, best, cases, fit.values)
        for number, case in enumerate(cases):
            # Errors are all but linear in the constants, so the one fit to all tells what comes of leaving one out.
            rest = np.arange(len(cases)) != number
            values = _better(fit.values, errors[rest], slopes[rest])
            found[case.id] = fit.build(found[case.id], values.tolist())
    return found


def _fits(reference: Reference, platform: Platform) -> tuple[_Fit, _Fit]:
    groups = sorted({size for kind, size in platform.base_bytes.items() if kind != "other"})
    kinds = [tuple(kind for kind, size in platform.base_bytes.items() if size == group) for group in groups]

    def with_exposure(old: Platform, values: Sequence[float]) -> Platform:
        return replace(old, launch_exposure=values[0])

    def with_bytes(old: Platform, values: Sequence[float]) -> Platform:
        """Set the workspace, and one base for each group of kinds that the data file gives the same base."""
        base = {kind: 1e9 * value for group, value in zip(kinds, values[1:], strict=True) for kind in group}
        return replace(old, workspace_ratio=values[0], base_bytes={**old.base_bytes, **base})

    return (
        _Fit(
            figure="time",
            values=np.array([platform.launch_exposure]),
            build=with_exposure,
            error=lambda case, used: predict_case(reference, case, used).step_s / case.step_s - 1.0,
        ),
        _Fit(
            figure="memory",
            values=np.array([platform.workspace_ratio, *(group / 1e9 for group in groups)]),
            build=with_bytes,
            error=lambda case, used: predict_case(reference, case, used).peak_bytes / case.peak_bytes - 1.0,
        ),
    )


def _solve(fit: _Fit, platform: Platform, cases: Sequence[ReferenceCase]) -> Vector:
    values = fit.values
    for _ in range(_ROUNDS):
        values = _better(values, *_linear(fit, platform, cases, values))
    return values


def _better(values: Vector, errors: Vector, slopes: Vector) -> Vector:
    """Return the constants at which errors would be least, if they went on as they begin; none is negative."""
    change, *_ = np.linalg.lstsq(slopes, -errors, rcond=_TELLING)
    return np.maximum(values + change, 0.0)


def _linear(fit: _Fit, platform: Platform, cases: Sequence[ReferenceCase], values: Vector) -> tuple[Vector, Vector]:
    """Return the errors at some constants, and how they change: a row for each run, a column for each constant."""

    def errors(at: Vector) -> Vector:
        used = fit.build(platform, at.tolist())
        return np.array([fit.error(case, used) for case in cases])

    here = errors(values)
    moved = (errors(values + _STEP * unit) - here for unit in np.eye(len(values)))
    return here, np.stack([change / _STEP for change in moved], axis=1)
