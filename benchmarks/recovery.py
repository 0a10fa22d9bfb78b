"""Print what a lost device costs a run, part by part, beside a stop, a new plan and a checkpoint; or the kill matrix.

python benchmarks/recovery.py [--preset laptop --preset asteroid-d-100:0.006] [--runs 3] [--no-network]
python benchmarks/recovery.py --matrix [--runs 1]

Real: processes, signals, computation, gradients, losses, TCP, encryption. Emulated: the devices' time and the links.

Of each preset, whose devices may have a part of their speed (a sample of gpt2-tiny is small), a plan of the planner's
trains gpt2-tiny. One after the other in one run of this script:

calm     a step without keepers and with them (`--protect none`, `auto` and `one`), in turns
kill     devices of all stages: the time until the loss is known, until all begin the step again, and until it is done;
         then the throughput, over that of the planner's own plan for the devices left
stop     the rival, tuned: a checkpoint after every step. The run ends, is planned anew, workers start, it goes on
leave    `spantrain drain` of a device, and its coming back: how long the others stand still

The matrix kills each device of a pipeline at each moment of a run, whose state is kept twice, and compares losses with
those of a run without the fault.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from signal import SIGKILL
from typing import Any

import psutil

import results
from spantrain.app.planning.protection import with_keepers
from spantrain.app.profiling.describe import described_profile
from spantrain.app.reporter import SilentReporter
from spantrain.app.session import Session, SessionOptions, open_session
from spantrain.app.training.outcome import TrainOutcome
from spantrain.app.training.requests import RunOptions, TrainRequest, resumed_run
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.config.artefacts import reference_to_profile, write_plan, write_profile
from spantrain.config.cluster_file import load_preset
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.errors import PeerLostError
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.present import full_plan
from spantrain.planner.request import Constraints, JobSpec
from spantrain.recovery.policy import OnLoss
from spantrain.runtime.coordinator.barrier import StepOutcome

PRESETS = ["laptop", "asteroid-b-100:0.02", "asteroid-d-100:0.006"]
MODEL, BATCH, OPTIMIZER = "gpt2-tiny", 48, "adamw"
BEFORE, AFTER, CALM = 3, 6, 8
"""Steps before a fault, behind it, and of a calm run."""
RESUME_S, TIMES, THROUGHPUT, CALM_COST, PAUSE_S = 2.0, 14.0, 0.95, 0.02, 1.0
"""What is wanted: seconds, times the rival, part of the throughput, part of a calm step, seconds of a pause."""
TOLERANCE = 1e-4
MOMENTS = (
    "before the first step",
    "0 %",
    "20 %",
    "40 %",
    "60 %",
    "80 %",
    "97 %",
    "while another is lost",
    "checkpoint",
)


@dataclass
class Watcher(SilentReporter):
    """Does something at a moment of a run, and notes when what happened."""

    at: Callable[["Watcher"], None] = lambda _watcher: None
    session: Session | None = None
    stop: StopRequest = field(default_factory=StopRequest)
    steps: list[StepOutcome] = field(default_factory=list)
    notes: list[tuple[float, str]] = field(default_factory=list)
    struck_s: float = 0.0

    def step(self, outcome: StepOutcome, _metrics: object, total_steps: int) -> None:  # noqa: ARG002
        """Note it."""
        self.steps.append(outcome)
        if len(self.steps) == BEFORE:
            self.at(self)

    def note(self, text: str) -> None:
        """Note it."""
        self.notes.append((time.monotonic(), text))

    def when(self, text: str) -> float:
        """Return when something was said."""
        return next(at_s for at_s, said in self.notes if text in said)

    def kill(self, name: str) -> None:
        """Kill a device's worker."""
        assert self.session is not None
        assert self.session.workers is not None
        self.struck_s = time.monotonic()
        self.session.workers.signal(name, SIGKILL)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained."""

    profile: Profile
    plan: Plan
    network: bool
    learning_rate: float = TrainJob.learning_rate

    def run(
        self, folder: Path, watcher: Watcher, *, steps: int, plan: Plan | None = None, every: int = 0, **options: Any
    ) -> TrainOutcome:
        """Train in workers of its own."""
        write_profile(self.profile, folder / "profile.json")
        chosen = plan or self.plan
        request = TrainRequest(
            plan=replace(chosen, profile=reference_to_profile(folder / "profile.json", folder / "plan.json")),
            profile=self.profile, profile_path=str(folder / "profile.json"),
            job=TrainJob(
                steps=steps, adapter="off", trace_steps=1, checkpoint_every=every, learning_rate=self.learning_rate
            ),
            out=folder,
            options=RunOptions(**{"protect": 1, **options}),
        )  # fmt: skip
        return self._with_workers(folder, watcher, tuple(self.profile.cluster.device_by_name), request)

    def _with_workers(
        self, folder: Path, watcher: Watcher, names: tuple[str, ...], request: TrainRequest
    ) -> TrainOutcome:
        with open_session(
            self.profile.cluster, names, SessionOptions(network=self.network), folder / "logs", watcher
        ) as watcher.session:
            return train(watcher.session, request, watcher.stop, watcher)

    def stopped(self, folder: Path, victim: str) -> tuple[float, float]:
        """Lose a device, end, plan anew and go on with the checkpoint; return the seconds, and those of a step then."""
        watcher = Watcher(at=lambda watcher: watcher.kill(victim))
        with contextlib.suppress(PeerLostError):
            self.run(folder, watcher, steps=1000, every=1, protect=0, on_loss=OnLoss.END)
        job = JobSpec(global_batch=BATCH, optimizer=OPTIMIZER)
        found = make_plan(self.profile, job, PlanOptions(constraints=Constraints(leave_out=(victim,)))).plan
        path = folder / "again.json"
        write_plan(replace(found, profile=reference_to_profile(folder / "profile.json", path)), path)
        request = resumed_run(folder, BEFORE + AFTER, folder / "again", functions=(), plan_path=path)
        after = Watcher()
        outcome = self._with_workers(folder / "again", after, found.devices, request)
        return after.when("All devices are ready") - watcher.struck_s, outcome.step_s_measured


def case_of(preset: str, *, network: bool) -> Case:
    """Plan a preset's cluster by its description."""
    name, _, speed = preset.partition(":")
    cluster = load_preset(name)
    cluster = replace(cluster, emulated_speed=float(speed)) if speed else cluster
    profile = described_profile(cluster, resolve_model(MODEL))
    plan = make_plan(profile, JobSpec(global_batch=BATCH, optimizer=OPTIMIZER)).plan
    return Case(profile=profile, plan=plan, network=network)


def victims_of(plan: Plan) -> list[str]:
    """Return the first device of the first, a middle and the last stage, and the last replica of the widest."""
    stages = plan.stages
    widest = max(stages, key=lambda stage: len(stage.replicas))
    chosen = [stages[0].devices[0], stages[len(stages) // 2].devices[0], stages[-1].devices[0], widest.devices[-1]]
    return list(dict.fromkeys(chosen))


def kill(case: Case, folder: Path, victim: str) -> dict[str, float]:
    """Lose a device in mid-run."""
    watcher = Watcher(at=lambda watcher: watcher.kill(victim))
    outcome = case.run(folder, watcher, steps=BEFORE + AFTER)
    resume_s = watcher.when("Training goes on after") - watcher.struck_s
    change = outcome.plan_changes[0]
    assert not any("go back" in text for _, text in watcher.notes), watcher.notes
    present = frozenset(case.profile.cluster.device_by_name) - {victim}
    full = full_plan(case.plan, case.profile, present, optimizer=OPTIMIZER).plan
    best = case.run(folder / "full", Watcher(), steps=AFTER, plan=full)
    return {
        "detect_s": resume_s - change.duration_s,
        "go_on_s": change.duration_s,
        "resume_s": resume_s,
        "first_step_s": watcher.steps[BEFORE].duration_s,
        "moved_bytes": float(change.moved_bytes),
        "throughput": best.step_s_measured / outcome.step_s_measured,
    }


def leave(case: Case, folder: Path, name: str) -> dict[str, float]:
    """Have a device leave and come back."""

    def at(watcher: Watcher) -> None:
        assert watcher.session is not None
        watcher.session.coordinator.ask_to_leave(name, "asked to")

    watcher = Watcher(at=at)
    back = threading.Thread(target=_come_back, args=(watcher, name), daemon=True)
    back.start()
    outcome = case.run(folder, watcher, steps=BEFORE + 3 * AFTER)
    assert not any("trained again" in text for _, text in watcher.notes), watcher.notes
    found = {"drain_s": outcome.plan_changes[0].duration_s}
    joined = [change.duration_s for change in outcome.plan_changes if f"{name} joined" in change.reason]
    return found | ({"join_s": joined[0]} if joined else {})


def _come_back(watcher: Watcher, name: str) -> None:
    while not any("Training goes on" in text for _, text in watcher.notes):
        time.sleep(0.1)
    assert watcher.session is not None
    time.sleep(1.0)
    watcher.session.start_again(name)


def calm(case: Case, folder: Path, runs: int) -> dict[str, float]:
    """Return how much longer a step is with keepers: of all stages, and as is done by default; runs in turns."""
    ways: dict[str, int | None] = {"none": 0, "auto": None, "one": 1}
    steps: dict[str, list[float]] = {way: [] for way in ways}
    for run in range(runs):
        for way, protect in ways.items():
            outcome = case.run(folder / f"calm-{run}-{way}", Watcher(), steps=CALM, protect=protect)
            steps[way].append(outcome.step_s_measured)
    middle = {way: statistics.median(own) for way, own in steps.items()}
    return {way: step_s / middle["none"] - 1.0 for way, step_s in middle.items() if way != "none"}


def measure(preset: str, *, runs: int, network: bool, folder: Path) -> dict[str, Any]:
    """Return the figures of a preset."""
    case = case_of(preset, network=network)
    kept = with_keepers(case.plan, case.profile, OPTIMIZER, 1)
    print(
        f"{preset}, stages (and keepers): "
        + " | ".join(f"{', '.join(one.devices)} ({', '.join(one.keepers)})" for one in kept.stages)
    )
    killed: dict[str, list[dict[str, float]]] = {}
    rival: list[float] = []
    left: list[dict[str, float]] = []
    folder = folder / preset.replace(":", "-")
    for run in range(runs):
        for victim in victims_of(case.plan):
            own = folder / f"kill-{run}-{victim}"
            killed.setdefault(victim, []).append(kill(case, own, victim))
            print(f"  run {run}, {victim} killed: {killed[victim][-1]}", flush=True)
        took_s, step_s = case.stopped(folder / f"stop-{run}", victims_of(case.plan)[0])
        rival.append(took_s)
        print(f"  run {run}, stop and checkpoint: {took_s:.2f} s, then {step_s:.3f} s a step", flush=True)
        left.append(leave(case, folder / f"leave-{run}", victims_of(case.plan)[-1]))
        print(f"  run {run}, leaves and comes: {left[-1]}", flush=True)
    cost = calm(case, folder, runs)
    every = [figures for own in killed.values() for figures in own]
    middle = {key: statistics.median(figures[key] for figures in every) for key in every[0]}
    return {
        "killed": killed, "median": middle, "worst_resume_s": max(figures["resume_s"] for figures in every),
        "stop_s": rival, "times": statistics.median(rival) / middle["resume_s"], "calm_cost": cost,
        "drain_s": statistics.median(one["drain_s"] for one in left),
        "join_s": statistics.median([one["join_s"] for one in left if "join_s" in one] or [float("nan")]),
        "joined": sum("join_s" in one for one in left), "runs": runs,
    }  # fmt: skip


def table_of(preset: str, found: dict[str, Any]) -> list[str]:
    """Return lines for people, each with what is wanted."""
    middle = found["median"]
    came = f"{found['joined']} of {found['runs']} taken in"
    seconds = {
        "killed: known after": (middle["detect_s"], 0.5),
        "killed: the step begins again after": (middle["resume_s"], RESUME_S),
        "  the worst": (found["worst_resume_s"], RESUME_S),
        "a device leaves: pause": (found["drain_s"], PAUSE_S),
        f"a device comes ({came}): pause": (found["join_s"], PAUSE_S),
    }
    rows = [
        (what, f"{took_s:.2f} s", f"under {most_s:g} s", took_s < most_s) for what, (took_s, most_s) in seconds.items()
    ]
    stop_s, times, part, cost = found["stop_s"], found["times"], middle["throughput"], found["calm_cost"]
    rows += [
        ("stop, plan anew, load a checkpoint", f"{statistics.median(stop_s):.2f} s", "", True),
        ("  times as long", f"{times:.1f}", f"at least {TIMES:g}", times >= TIMES),
        ("throughput then, over a full plan's", f"{part:.3f}", f"at least {THROUGHPUT}", part >= THROUGHPUT),
        (
            "keepers, by default: a calm step is longer by",
            f"{cost['auto']:.1%}",
            f"at most {CALM_COST:.0%}",
            cost["auto"] <= CALM_COST,
        ),
        ("keepers of all stages: a calm step is longer by", f"{cost['one']:.1%}", "", True),
        ("state that moved", f"{middle['moved_bytes'] / 2**20:.2f} MiB", "", True),
    ]
    return [
        f"{preset:<22}{what:<48}{value:>10}  {wanted:<15}{('holds' if holds else 'missed') if wanted else ''}".rstrip()
        for what, value, wanted, holds in rows
    ]


def matrix(folder: Path, runs: int) -> list[str]:
    """Kill each device of a pipeline at each moment; return a line for each, with how far losses are off."""
    case = case_of("laptop", network=False)
    calm_run = case.run(folder / "calm", Watcher(), steps=BEFORE + 2, every=1)
    step_s, lines = calm_run.step_s_measured, []
    for moment in MOMENTS:
        for victim in case.plan.devices:
            worst = 0.0
            for run in range(runs):
                own = folder / f"{MOMENTS.index(moment)}-{victim}-{run}"
                worst = max(worst, _one(case, own, moment, victim, step_s, calm_run))
            lines.append(f"{moment:<24}{victim:<14}{worst:.1e}  {'holds' if worst <= TOLERANCE else 'missed'}")
            print(lines[-1], flush=True)
    left = [process.pid for process in psutil.Process().children(recursive=True) if process.is_running()]
    lines.append(f"processes left behind: {len(left)}")
    return lines


def _one(case: Case, folder: Path, moment: str, victim: str, step_s: float, calm_run: TrainOutcome) -> float:
    def at(watcher: Watcher) -> None:
        delay_s = float(moment.split()[0]) / 100 * step_s if "%" in moment else 0.0
        if moment == "while another is lost":
            others = [name for name in case.plan.devices if name != victim]
            watcher.kill(others[0])
            threading.Timer(0.3, watcher.kill, (victim,)).start()
        elif delay_s:
            threading.Timer(delay_s, watcher.kill, (victim,)).start()
        elif moment != "before the first step":
            watcher.kill(victim)

    class Early(Watcher):
        def note(self, text: str) -> None:
            super().note(text)
            if moment == "before the first step" and "All devices are ready" in text:
                self.kill(victim)

    every = int(moment == "checkpoint")
    protect = 2 if moment == "while another is lost" else 1
    outcome = case.run(folder, Early(at=at), steps=BEFORE + 2, every=every, protect=protect)
    assert victim not in outcome.devices, "it was not lost"
    return max(abs(one - other) for one, other in zip(outcome.losses, calm_run.losses, strict=True))


def main() -> int:
    """Measure; return 1 if something that is wanted is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", action="append", help=f"NAME or NAME:SPEED; default: {', '.join(PRESETS)}")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--no-network", action="store_true", help="all on loopback, unshaped")
    parser.add_argument(
        "--matrix", action="store_true", help="kill each device at each moment, in the place of all else"
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if options.matrix:
            table = matrix(Path(name), options.runs)
            data: dict[str, Any] = {"lines": table}
        else:
            data, table = {}, []
            for preset in options.preset or PRESETS:
                data[preset] = measure(preset, runs=options.runs, network=not options.no_network, folder=Path(name))
                table += table_of(preset, data[preset])
    print("\n".join(table))
    if options.save:
        results.save("recovery_matrix" if options.matrix else "recovery", table, {"results": data})
    return int(any(line.endswith("missed") for line in table))


if __name__ == "__main__":
    sys.exit(main())
