"""Print the bytes that runs held, beside the memory model's forecast.

    python benchmarks/memory_forecast.py [MODEL ...]

Each model is trained for a few steps in three stages on the laptop preset: real worker processes, real computation and
gradients; the speed of devices and links is emulated. Columns, by device: `measured`, the most bytes of tensors held at
once (parameters, gradients, optimizer state, what autograd and messages hold; `runtime.memory`); `forecast`, the memory
model over the simulated steps, without the framework's constant, which is a GPU process's; `by its order`, the same
model over the actions and messages that the run really had: where it differs from the forecast, the simulator expected
another order of work, not other bytes.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from spantrain.app.describe import described_profile
from spantrain.app.predict import predict
from spantrain.config.artefacts import reference_to_profile, write_plan, write_profile
from spantrain.config.presets import load_preset
from spantrain.core.action import Action
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.profile import Profile
from spantrain.core.spans import equal_spans
from spantrain.core.trace import Trace
from spantrain.cost.memory import MemoryCost
from spantrain.models.catalog import resolve_model
from spantrain.schedule.perfetto import read_trace
from spantrain.sim.memory import MemoryLog

MODELS = ("gpt2-tiny", "bert-small-tiny", "resnet-tiny", "efficientnet-tiny")
SCHEDULES = ("1f1b", "critical-path")
DEVICES = ("lab-0", "lab-1", "office-nx")
STEPS = 4
SAMPLES, SPAN = 24, 4
BOUND = 0.05


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    model: str
    schedule: str
    recompute: bool

    @property
    def label(self) -> str:
        """How it is called in the table."""
        return f"{self.model}, {self.schedule}{', every second unit again' if self.recompute else ''}"


def plan_of(case: Case, profile: Profile) -> Plan:
    """Return three stages of as many units each, with memory for fewer samples than there are."""
    count = len(profile.graph.units)
    bounds = [round(count * number / len(DEVICES)) for number in range(len(DEVICES) + 1)]
    stages = []
    for index, device in enumerate(DEVICES):
        units = range(bounds[index], bounds[index + 1])
        limit = SPAN * (len(DEVICES) - index) if case.schedule == "1f1b" else 3 * SPAN
        stages.append(
            Stage(
                first_unit=units.start,
                end_unit=units.stop,
                replicas=(Replica(devices=(device,), sample_share=1.0, in_flight_limit=limit),),
                micro_batches=equal_spans(SAMPLES, SPAN),
                recompute=tuple(units[::2]) if case.recompute else (),
            )
        )
    return Plan(
        cluster=profile.cluster,
        model=profile.model,
        global_batch=SAMPLES,
        dtype="float32",
        stages=tuple(stages),
        schedule=case.schedule,
    )


def train(plan: Plan, profile: Profile, folder: Path) -> tuple[dict[str, int], Trace]:
    """Train the plan; return the bytes that each device held at most, and all steps' trace."""
    profile_path, plan_path, run = folder / "profile.json", folder / "plan.json", folder / "run"
    write_profile(profile, profile_path)
    write_plan(replace(plan, profile=reference_to_profile(profile_path, plan_path)), plan_path)
    command = [sys.executable, "-m", "spantrain", "train", str(plan_path), "--steps", str(STEPS), "--out", str(run)]
    command += ["--trace-steps", str(STEPS), "--optimizer", "adamw", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    figures = json.loads(done.stdout)["devices"]
    return {name: figures[name]["peak_bytes"] for name in plan.devices}, read_trace(run / "trace.json")


def by_its_order(plan: Plan, profile: Profile, trace: Trace) -> dict[str, int]:
    """Return what the memory model says of the actions and messages in a trace."""
    sizes = MemoryCost(profile, "adamw", plan.dtype).plan_held_sizes(plan)
    log = MemoryLog(sizes)
    for name in plan.devices:
        for interval in (interval for interval in trace.intervals if interval.device == name):
            lane, what = interval.lane, interval.name.partition(" ")[0]
            size_bytes = int(interval.detail.get("bytes", 0))
            if lane == "compute" and interval.name[0].isdigit():
                log.computed(name, Action.parse(interval.name), interval.start_s, interval.end_s)
            elif lane == "receive" and what in ("forward", "backward"):
                log.received(name, size_bytes, interval.end_s)
            elif lane == "send" and what == "backward":
                log.sent(name, size_bytes, interval.start_s, interval.end_s)
            elif lane == "send" and what == "forward":
                log.sent(name, size_bytes, interval.start_s, interval.end_s, forward=True)
    return {name: log.of(name, name).tensor_bytes for name in plan.devices}


def main() -> None:
    """Run all cases and print the table."""
    print(f"{'KiB':10} {'measured':>10} {'forecast':>10} {'by its order':>21}")
    errors: dict[str, list[float]] = {"forecast": [], "by its order": []}
    for model in sys.argv[1:] or MODELS:
        profile = described_profile(load_preset("laptop"), resolve_model(model))
        for case in (Case(model=model, schedule=s, recompute=r) for s in SCHEDULES for r in (False, True)):
            plan = plan_of(case, profile)
            with tempfile.TemporaryDirectory() as folder:
                measured, trace = train(plan, profile, Path(folder))
            forecast = predict(plan, profile, optimizer="adamw").memory
            replayed = by_its_order(plan, profile, trace)
            print(case.label)
            for name in plan.devices:
                row = (forecast[name].tensor_bytes, replayed[name])
                off = [size / measured[name] - 1 for size in row]
                for found, error in zip(errors.values(), off, strict=True):
                    found.append(error)
                cells = [f"{size / 1024:10.0f} {error:+7.1%}" for size, error in zip(row, off, strict=True)]
                print(f"{name:10} {measured[name] / 1024:10.0f} {'   '.join(cells)}", flush=True)
    for what, found in errors.items():
        within = sum(abs(error) <= BOUND for error in found)
        print(f"{what}: {within} of {len(found)} within {BOUND:.0%}; largest {max(map(abs, found)):.1%}")


if __name__ == "__main__":
    main()
