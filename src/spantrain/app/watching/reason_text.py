"""Why a step took as long as it did, in words: for people, from what `chain` found."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from spantrain.app.watching.chain import BETWEEN, ChainPart, Lateness, StepReason
from spantrain.core.quantities import format_seconds

if TYPE_CHECKING:
    from spantrain.app.watching.view import Timeline


def late_line(reason: StepReason) -> str:
    """Return one line on a step that took much longer than forecast."""
    times = reason.duration_s / reason.forecast_s
    took = f"Step {reason.step + 1} took {format_seconds(reason.duration_s)}, {times:.1f} times its forecast"
    if reason.late is None or reason.rest_s > reason.late.excess_s:
        return f"{took}: {format_seconds(reason.rest_s)} of it are outside of its work and messages"
    return f"{took}: {lateness_text(reason.late)}"


def lateness_text(late: Lateness) -> str:
    """Return who was late, by how much, since when, against what."""
    what = "the link" if " -> " in late.place else "device"
    text = f"{what} {late.place} took {format_seconds(late.excess_s)} longer than forecast"
    if late.usual_s is None or late.now_s is None:
        return f"{text}; nothing was measured before"
    compared = f"{format_seconds(late.now_s)} in this step, {format_seconds(late.usual_s)} as a rule"
    if late.since_step is None:
        return f"{text}, about as in the steps before ({compared})"
    return f"{text}, late since step {late.since_step + 1} ({compared})"


def chain_lines(reason: StepReason) -> Iterator[str]:
    """Yield the chain, a line for each part; work in a row on one device is one line."""
    for group in _together(reason.chain):
        first, last = group[0], group[-1]
        spent_s = sum(part.duration_s for part in group)
        known = [part.forecast_s for part in group if part.forecast_s is not None]
        forecast = f", forecast {format_seconds(sum(known))}" if known else ""
        names = [part.what for part in group if part.what != BETWEEN]
        what = f"{names[0]} to {names[-1]}, {len(names)} in all" if len(names) > 1 else "".join(names) or BETWEEN
        times = f"{first.start_s:8.3f} s to {last.end_s:8.3f} s"
        yield f"{times}  {first.place}: {what}: {format_seconds(spent_s)}{forecast}"


def unfinished_lines(step: "Timeline", devices: Iterable[str]) -> Iterator[str]:
    """Yield what each device did last of a step that was never ended."""
    for device in devices:
        work = step.work.get(device, ())
        came = max((message for message in step.messages if message[1] == device), key=lambda one: one[4], default=None)
        did = f"{work[-1][0]}, ended at {work[-1][2]:.3f} s" if work else "nothing that anybody knows of"
        heard = f"; the last that came to it: {came[2]} from {came[0]} at {came[4]:.3f} s" if came else ""
        yield f"{device}: {did}{heard}"


def _together(chain: tuple[ChainPart, ...]) -> list[list[ChainPart]]:
    groups: list[list[ChainPart]] = []
    for part in chain:
        if groups and groups[-1][-1].place == part.place and " -> " not in part.place:
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups
