"""Print what the kill of a device costs under SpanTrain, torchft and TorchElastic, and its coming back.

python benchmarks/lost_device_rivals.py [--runs 3] [--side ours --side torchft --side elastic]

Real: processes, signals, computation, gradients, losses, sums over TCP, state that moves. Emulated: the devices' time,
by the same law on all sides. Not emulated: the network; all sides are on loopback, unshaped, since the rivals'
sockets would need namespaces. That favours the rivals, which sum the whole model's gradients over it.

Six devices of the `laptop` preset train gpt2-tiny, 48 samples a step, AdamW. In each run, another device is killed at
another moment of a step, the same on all sides; six steps later its worker is started again.

ours      a plan of the planner's, with keepers (`--protect one`)
torchft   the whole model on each device, DistributedDataParallel over Gloo, state from a peer. Each device has samples
          by its speed: who takes part is asked for in a sum of one number for each device before each step
elastic   TorchElastic: the whole model on each device, DistributedDataParallel over Gloo, samples by speed, a
          checkpoint after every step, on a disk that all read. Its agents fork workers from a process that has
          imported all and made the model; `torchrun` itself starts Python anew for each. A device is agent and worker

torchft must be installed: pip install torchft-nightly; survivors of a run with torchft 0.2.0 end with an AssertionError
in its DistributedDataParallel when a sum over Gloo fails.
"""

import argparse
import importlib.metadata
import math
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

import results
from lost_device_rivals_sides import Moments, Story, elastic, ours, torchft
from lost_device_rivals_worker import (
    BATCH,
    HEARTBEAT_MS,
    HEARTBEAT_TIMEOUT_MS,
    JOIN_TIMEOUT_MS,
    MONITOR_S,
    RENDEZVOUS,
    SUM_TIMEOUT_S,
    TICK_MS,
)
from recovery import MODEL, TOLERANCE, case_of
from spantrain.core.job import TrainJob
from spantrain.models.catalog.catalog import resolve_model
from spantrain_studies.comparison.worker.reference import reference_losses

SIDES = {"ours": ours, "torchft": torchft, "elastic": elastic}
TITLES = {"ours": "SpanTrain", "torchft": "torchft", "elastic": "TorchElastic"}
VICTIMS, PARTS = ("lab-1", "office-tx2", "home-tx2"), (0.2, 0.5, 0.8)
"""In turns: a replica that has others, the only one of its stage, and one with a weaker beside it; parts of a step."""
COMPARED = 24
"""Steps whose losses are compared: at the twenty-sixth, a spike, the order of sums alone makes another loss."""
ROWS = {
    "known_s": "killed: known to another after, s",
    "next_end_s": "killed: the next step that counts ends after, s",
    "cost_s": "  over a step's time then, s",
    "redone": "  steps trained again",
    "before_s": "a step before, s",
    "after_s": "a step with those left, s",
    "pause_s": "started again: the others stand still, s",
    "back_s": "  the first step with it ends after, s",
    "with_it_s": "  a step then, s",
}


def figures(story: Story, victim: str) -> dict[str, float]:
    """Return what a run cost."""
    steps = sorted(story.steps.values(), key=lambda step: step.ended_s)
    took = [(step, step.ended_s - before.ended_s) for before, step in pairwise(steps)]
    before = [took_s for step, took_s in took if step.ended_s < story.struck_s and victim in step.devices]
    number = next(number for number, step in enumerate(steps) if step.ended_s > story.struck_s)
    following = steps[number]
    after = [took_s for step, took_s in took if following.ended_s < step.ended_s < story.again_s]
    after_s = statistics.median(after)
    found = {
        "known_s": story.known_s - story.struck_s,
        "next_end_s": following.ended_s - story.struck_s,
        "cost_s": took[number - 1][1] - after_s,
        "redone": float(story.redone),
        "before_s": statistics.median(before),
        "after_s": after_s,
        "starts_s": story.starts_s,
    }
    back = next((step for step in steps if step.ended_s > story.again_s and victim in step.devices), None)
    if back is None:
        return found
    with_it_s = statistics.median(took_s for step, took_s in took if step.ended_s > back.ended_s)
    first_s = next(took_s for step, took_s in took if step is back)
    return {**found, "pause_s": first_s - with_it_s, "back_s": back.ended_s - story.again_s, "with_it_s": with_it_s}


def measure(sides: list[str], runs: int, folder: Path) -> dict[str, Any]:
    """Return each run's figures, by side, and how far losses are off those of a run without the fault."""
    case = case_of("laptop", network=False)
    stories: dict[str, list[Story]] = {side: [] for side in sides}
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for run in range(runs):
        moments = Moments(victim=VICTIMS[run % len(VICTIMS)], part=PARTS[run % len(PARTS)])
        for side in sides:
            story = SIDES[side](case, folder / f"{side}-{run}", moments)
            stories[side].append(story)
            found[side].append(figures(story, moments.victim))
            text = ", ".join(f"{key} {value:.2f}" for key, value in found[side][-1].items())
            print(f"  run {run}, {TITLES[side]}, {moments.victim} at {moments.part:.0%} of a step: {text}", flush=True)
    calm = reference_losses(resolve_model(MODEL), TrainJob(steps=COMPARED), BATCH)
    off = {
        side: max(abs(story.steps[number].loss - calm[number]) for story in own for number in _compared(story))
        for side, own in stories.items()
    }
    late = sum(max(_compared(story)) < max(story.steps) for own in stories.values() for story in own)
    missing = sum(set(story.steps) != set(range(max(story.steps) + 1)) for own in stories.values() for story in own)
    return {"runs": found, "loss_off": off, "runs_with_steps_missing": missing, "runs_that_went_on": late}


def _compared(story: Story) -> list[int]:
    return [number for number in story.steps if number < COMPARED]


def table_of(found: dict[str, Any]) -> list[str]:
    """Return lines for people: medians, and what they were got with."""
    sides = list(found["runs"])
    lines = [f"{'median of runs':<52}" + "".join(f"{TITLES[side]:>14}" for side in sides)]
    for key, title in ROWS.items():
        lines.append(f"{title:<52}" + "".join(f"{_median(found['runs'][side], key):>14.2f}" for side in sides))
    taken = [f"{sum('back_s' in one for one in own)} of {len(own)}" for own in found["runs"].values()]
    lines.append(f"{'  taken in, runs':<52}" + "".join(f"{text:>14}" for text in taken))
    off = found["loss_off"]
    lines.append(
        f"{'losses: off those without a fault, at most':<52}" + "".join(f"{off[side]:>14.1e}" for side in sides)
    )
    equal = ("yes" if off[side] <= TOLERANCE else "no" for side in sides)
    lines.append(f"{f'  equal to {TOLERANCE:g}':<52}" + "".join(f"{text:>14}" for text in equal))
    return [*lines, "", *_said(found, sides)]


def _median(own: list[dict[str, float]], key: str) -> float:
    return statistics.median([one[key] for one in own if key in one] or [math.nan])


def _said(found: dict[str, Any], sides: list[str]) -> list[str]:
    kills = ", ".join(f"{victim} at {part:.0%}" for victim, part in zip(VICTIMS, PARTS, strict=True))
    said = [
        "Emulated: the devices' time, by one law. Real: all else. Network: loopback, not shaped, on all sides.",
        f"Killed, in turns, at a part of a step: {kills}.",
        "No side loses samples: what did not count is trained again.",
    ]
    if "torchft" in sides:
        said.append(
            f"torchft {_torchft_version()}: heartbeats every {HEARTBEAT_MS} ms, dead after {HEARTBEAT_TIMEOUT_MS} ms, "
            f"ticks of {TICK_MS} ms, join timeout {JOIN_TIMEOUT_MS} ms, sums time out after {SUM_TIMEOUT_S:g} s."
        )
    if "elastic" in sides:
        starts_s = _median(found["runs"]["elastic"], "starts_s")
        options = ", ".join(f"{name} {value}" for name, value in RENDEZVOUS.items())
        said.append(
            f"TorchElastic: {options} (whole seconds), looks every {MONITOR_S:g} s, nodes 5:6, workers forked; "
            f"from a worker's start until it was ready again: {starts_s:.2f} s."
        )
    said.append(
        f"Losses are compared over {COMPARED} steps at most; {found['runs_that_went_on']} runs went on behind them."
    )
    left = [process.pid for process in psutil.Process().children(recursive=True) if process.is_running()]
    return [*said, f"Processes left behind: {len(left)}. Runs with steps missing: {found['runs_with_steps_missing']}."]


def _torchft_version() -> str | None:
    """Return the version of torchft that is installed, None without one."""
    for name in ("torchft-nightly", "torchft"):
        try:
            return f"{importlib.metadata.version(name)}{' (nightly)' if name.endswith('nightly') else ''}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--side", action="append", choices=tuple(SIDES), help="default: all of them")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    options = parser.parse_args()
    sides = options.side or list(SIDES)
    if "torchft" in sides and _torchft_version() in (None, "0.1.0", "0.1.1", "0.2.0"):
        print("torchft is not installed: pip install torchft-nightly (0.2.0 does not survive a lost device on Gloo)")
        sides.remove("torchft")
    if not sides:
        return 0
    with tempfile.TemporaryDirectory() as name:
        found = measure(sides, options.runs, Path(name))
    table = table_of(found)
    print("\n".join(table))
    if options.save:
        results.save("lost_device_rivals", table, {"torchft": _torchft_version(), "results": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
