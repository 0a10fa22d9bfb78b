"""Fit a platform's constants: `benchmarks/calibrate_platform.py ../shared/reference [--platform megatron-deepspeed]`.

Least squares of relative errors, on the runs that the folder marks `use: calibrate` and on no others; figures that the
folder flags are left out. Time and memory are fitted apart, since they share no constant. Prints the constants for the
platform's data file, what each run is off with them, and how they move when any one run is left out, with the error on
the run that was not seen.

Nothing is emulated: measured runs of others, predicted by `spantrain.sim`.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spantrain_studies.reference.costs import predict_case
from spantrain_studies.reference.folder import read_reference
from spantrain_studies.reference.platform import Platform, load_platform
from spantrain_studies.reference.types import Reference, ReferenceCase
from spantrain_studies.reference.validate import PLATFORM, excluded_figures

Vector = NDArray[np.float64]
_ROUNDS = 15
_STEP = 1e-3


@dataclass(frozen=True)
class Fit:
    """What is fitted to what."""

    what: str
    names: tuple[str, ...]
    scale: tuple[float, ...]
    """Of each constant: about how large it is."""
    build: Callable[[Platform, Sequence[float]], Platform]
    predicted: Callable[[Reference, ReferenceCase, Platform], float]
    measured: Callable[[ReferenceCase], float]


def main() -> None:
    """Fit time, then memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--platform", default=PLATFORM)
    arguments = parser.parse_args()
    reference, platform = read_reference(arguments.folder), load_platform(arguments.platform)
    for fit in (_time_fit(), _memory_fit(platform)):
        cases = [c for c in reference.cases if c.calibrate and fit.what not in excluded_figures(c.flags)]
        _report(fit, reference, platform, cases)


def _time_fit() -> Fit:
    names = ("launch_exposure", "receive_wait_s", "eager_send_bytes")

    def build(platform: Platform, values: Sequence[float]) -> Platform:
        return replace(platform, **dict(zip(names, values, strict=True)))

    return Fit(
        what="time",
        names=names,
        scale=(1.0, 1e-3, 1e6),
        build=build,
        predicted=lambda reference, case, platform: predict_case(reference, case, platform).step_s,
        measured=lambda case: case.step_s,
    )


def _memory_fit(platform: Platform) -> Fit:
    """Fit the workspace, and one base for each group of kinds that the data file gives the same base."""
    groups = sorted({size for kind, size in platform.base_bytes.items() if kind != "other"})
    kinds = [tuple(k for k, size in platform.base_bytes.items() if size == group) for group in groups]

    def build(old: Platform, values: Sequence[float]) -> Platform:
        base = {kind: value for group, value in zip(kinds, values[1:], strict=True) for kind in group}
        return replace(old, workspace_ratio=values[0], base_bytes={**old.base_bytes, **base})

    return Fit(
        what="memory",
        names=("workspace_ratio", *("base_bytes of " + ", ".join(group) for group in kinds)),
        scale=(1.0, *(1e9 for _ in groups)),
        build=build,
        predicted=lambda reference, case, platform: predict_case(reference, case, platform).peak_bytes,
        measured=lambda case: case.peak_bytes,
    )


def _report(fit: Fit, reference: Reference, platform: Platform, cases: list[ReferenceCase]) -> None:
    print(f"\n{fit.what}: {len(fit.names)} constants on {len(cases)} runs")
    found = _least_squares(fit, reference, platform, cases)
    for name, value in zip(fit.names, found * fit.scale, strict=True):
        print(f"  {name}: {value:.4g}")
    for case, error in zip(cases, _errors(fit, reference, platform, cases, found), strict=True):
        print(f"    {error:+7.2%}  {case.id}")
    print("  leaving one out: its error, and the constants without it")
    for case in cases:
        rest = [other for other in cases if other is not case]
        without = _least_squares(fit, reference, platform, rest)
        error = _errors(fit, reference, platform, [case], without)[0]
        values = ", ".join(f"{value:.4g}" for value in without * fit.scale)
        blind = _untold(fit, reference, platform, rest, without)
        remark = f" (no other run tells {', '.join(blind)}: as in the file)" if blind else ""
        print(f"    {error:+7.2%}  {case.id}: {values}{remark}")


def _untold(
    fit: Fit, reference: Reference, platform: Platform, cases: list[ReferenceCase], values: Vector
) -> list[str]:
    """Return the constants that change no run's prediction."""
    slopes = _slopes(fit, reference, platform, cases, values)
    return [name for name, column in zip(fit.names, slopes.T, strict=True) if not np.any(np.abs(column) > 1e-9)]


def _slopes(fit: Fit, reference: Reference, platform: Platform, cases: list[ReferenceCase], values: Vector) -> Vector:
    """Return how errors change with constants: a row for each run, a column for each constant."""
    errors = _errors(fit, reference, platform, cases, values)
    columns = []
    for index in range(len(values)):
        moved = values.copy()
        moved[index] += _STEP
        columns.append((_errors(fit, reference, platform, cases, moved) - errors) / _STEP)
    return np.stack(columns, axis=1)


def _errors(fit: Fit, reference: Reference, platform: Platform, cases: list[ReferenceCase], values: Vector) -> Vector:
    changed = fit.build(platform, [float(value) for value in values * np.array(fit.scale)])
    return np.array([fit.predicted(reference, case, changed) / fit.measured(case) - 1.0 for case in cases])


def _least_squares(fit: Fit, reference: Reference, platform: Platform, cases: list[ReferenceCase]) -> Vector:
    """Return the constants (over their scale) by Gauss-Newton; what no run can tell stays at what the file has."""
    values = np.array(_present(fit, platform)) / np.array(fit.scale)
    for _ in range(_ROUNDS):
        errors = _errors(fit, reference, platform, cases, values)
        slopes = _slopes(fit, reference, platform, cases, values)
        change, *_ = np.linalg.lstsq(slopes, -errors, rcond=1e-6)
        values = np.maximum(values + change, 0.0)
    return values


def _present(fit: Fit, platform: Platform) -> list[float]:
    if fit.what == "time":
        return [getattr(platform, name) for name in fit.names]
    bases = sorted({size for kind, size in platform.base_bytes.items() if kind != "other"})
    return [platform.workspace_ratio, *bases]


if __name__ == "__main__":
    main()
