"""What `--adapter auto` costs when the network is calm: short runs of one plan with `auto` and `off` in turns.

    python benchmarks/adapter_calm.py [--model gpt2-tiny] [--rounds 4] [--steps 9]

Live on the testbed, four stages on four sites as in `adapter.py`, all runs on the same workers. Emulated: devices' time
and the network; the computation is real. Counted are the seconds of steps (the first of each run left out) and the
processor seconds of the coordinator, whose adviser this is, and of the workers, with their links' monitors; those say
more than seconds do on a machine that has other things to do.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

import psutil

from adapter_case import METHODS, Case
from adapter_live import LIVE, train_one
from results import save
from spantrain.app.profiling.rehearsal import rehearse
from spantrain.app.reporter import SilentReporter
from spantrain.app.session import Session, SessionOptions, open_session
from spantrain.core.job import TrainJob
from spantrain.runtime.coordinator.barrier import StepOutcome

OURS = {method.adapter: method for method in METHODS if method.plan == "ours" and not method.allowed}


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One short run."""

    adapter: str
    steps_s: tuple[float, ...]
    """Without the first."""
    coordinator_cpu_s: float
    """A step."""
    workers_cpu_s: float
    """A step, of all of them."""
    changes: tuple[str, ...]
    """Why the plan was changed, each time."""


class _Steps(SilentReporter):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def step(self, outcome: StepOutcome, _metrics: object, total_steps: int) -> None:
        """Keep a step's seconds."""
        del total_steps
        self.seconds.append(outcome.duration_s)


def main() -> None:
    """Run the turns, print and write the table."""
    options = _options()
    turns: list[Turn] = []
    for turn in _turns(options.model, options.rounds, options.steps):
        turns.append(turn)
        print(f"{turn.adapter:5} {median(turn.steps_s):.3f} s a step", flush=True)
    table = _table(options.model, turns)
    print("\n".join(table))
    save("adapter_calm", table, {"emulated": __doc__, "turns": [asdict(turn) for turn in turns]})


def _turns(model: str, rounds: int, steps: int) -> Iterator[Turn]:
    case = Case(model, LIVE[model])
    plan = case.ours
    with (
        tempfile.TemporaryDirectory() as folder,
        open_session(plan.cluster, plan.devices, SessionOptions(), Path(folder) / "logs", SilentReporter()) as session,
    ):
        case.know(rehearse(session, case.profile.link_by_pair.values()))
        _turn(session, case, "off", steps, Path(folder))  # a warm-up
        for number in range(rounds):
            for adapter in ("auto", "off") if number % 2 else ("off", "auto"):
                yield _turn(session, case, adapter, steps, Path(folder))


def _turn(session: Session, case: Case, adapter: str, steps: int, folder: Path) -> Turn:
    reporter = _Steps()
    workers_s, own_s = _children_s(), time.process_time()
    outcome = train_one(session, case, OURS[adapter], TrainJob(steps=steps), folder, reporter=reporter)
    return Turn(
        adapter=adapter,
        steps_s=tuple(reporter.seconds[1:]),
        coordinator_cpu_s=(time.process_time() - own_s) / steps,
        workers_cpu_s=(_children_s() - workers_s) / steps,
        changes=tuple(change.reason for change in outcome.plan_changes),
    )


def _children_s() -> float:
    """Return the processor seconds of all processes that this one has started and that run."""
    total_s = 0.0
    for child in psutil.Process().children(recursive=True):
        times = child.cpu_times()
        total_s += times.user + times.system
    return total_s


def _table(model: str, turns: list[Turn]) -> list[str]:
    lines = [
        f"{model}, calm links, {len(turns) // 2} rounds of {len(turns[0].steps_s)} steps each, live",
        f"{'adapter':8} {'median s':>9} {'mean s':>8} {'cpu s/step here':>16} {'cpu s/step, workers':>20} changes",
    ]
    found = {name: [turn for turn in turns if turn.adapter == name] for name in ("off", "auto")}
    seconds = {name: [s for turn in rows for s in turn.steps_s] for name, rows in found.items()}
    for name, rows in found.items():
        lines.append(
            f"{name:8} {median(seconds[name]):9.4f} {fmean(seconds[name]):8.4f} "
            f"{fmean(turn.coordinator_cpu_s for turn in rows):16.4f} "
            f"{fmean(turn.workers_cpu_s for turn in rows):20.4f} {sum(len(turn.changes) for turn in rows)}"
        )
    lines += [f"changed: {reason}" for turn in turns for reason in turn.changes]
    pairs = [median(auto.steps_s) / median(off.steps_s) for auto, off in zip(found["auto"], found["off"], strict=True)]
    lines.append(f"auto over off: median of rounds {median(pairs):.4f} ({min(pairs):.4f} to {max(pairs):.4f})")
    return lines


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2-tiny")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=9)
    return parser.parse_args()


if __name__ == "__main__":
    main()
