"""The live part of `adapter.py`: the same plans on the testbed, one method after the other, on one set of workers.

Steps are small enough that real computation stays a small part of emulated time; what the runtime itself takes is
measured first, in a rehearsal, and counted in our plan, in what is simulated and in the bound. All methods see the same
links at the same seconds: as they are for the first quarter of our steps, slow for half of them or so, then as they are
again.
"""

import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from adapter_case import METHODS, Case, Method, Size
from results import line_plot, save
from spantrain.app.profiling.rehearsal import rehearse
from spantrain.app.reporter import Reporter, SilentReporter
from spantrain.app.session import Session, SessionOptions, open_session
from spantrain.app.training.outcome import TrainOutcome
from spantrain.app.training.requests import RunOptions, TrainRequest
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.config.traces.network_traces import NetworkTrace, network_links
from spantrain.core.job import TrainJob
from spantrain.core.speed import SpeedTrace

LIVE = {
    "gpt2-tiny": Size(samples=48, micro_batch=6, work_s=2.4),
    "resnet-tiny": Size(samples=64, micro_batch=8, work_s=2.0),
}
"""With fewer samples a step the paper's adapter comes to micro-batches of one sample, and all methods to the bound."""
EXACT = tuple(method for method in METHODS if method.plan in ("tuned", "ours") and not method.allowed)
"""The paper's pipeline and adapter, then ours."""
_WITHIN = 1.03
"""Of a calm step: recovered."""
_SETTLING = 3
"""Steps on slow links after which every adapter has answered."""


@dataclass(frozen=True, kw_only=True)
class LiveRow:
    """One run."""

    model: str
    left: float
    method: str
    seed: int
    samples: int
    calm_s: float
    """Median of the steps before links are slow, the first left out."""
    slow_s: float
    """Mean of all steps that lie in the slow time."""
    settled_s: float
    """The same without the first three of them, or the last one where there are no more."""
    steps_until_calm: int | None
    """Steps that begin after the links are as they were, until one is within 3 % of the calm ones; None: none is."""
    bound_calm_s: float
    bound_s: float
    predicted_calm_s: float
    real_compute: float
    """Of emulated time, on the device where it is most."""
    begin_s: float
    end_s: float
    changes: tuple[str, ...]
    losses: tuple[float, ...]
    steps: tuple[tuple[float, float], ...]
    """When each began, and its seconds."""


def show(models: Sequence[str], left: str, steps: int, seeds: int) -> None:
    """Run all, print and write the table; it is written anew behind each model."""
    parts = [float(part) for part in left.split(",")]
    cases = [(part, seeds * number + k) for number, part in enumerate(parts) for k in range(seeds)]
    rows: list[LiveRow] = []
    for model in models:
        for row in _runs(Case(model, LIVE[model]), cases, steps):
            rows.append(row)
            print(_told(row), flush=True)
        _write(rows, parts)


def _write(rows: Sequence[LiveRow], parts: Sequence[float]) -> None:
    models = dict.fromkeys(row.model for row in rows)
    table = [line for model in models for part in parts for line in _table(rows, model, part)]
    print("\n".join(table))
    first = [row for row in rows if (row.model, row.seed) == (rows[0].model, rows[0].seed)]
    plot = line_plot(
        {row.method: row.steps for row in first},
        title=f"live: {first[0].model}, links at {first[0].left:.0%} for a while",
        across="seconds",
        up="seconds a step",
    )
    about = {"emulated": "devices' time, and the network's rate and delay", "about": __doc__}
    save("adapter_live", table, {**about, "rows": [asdict(row) for row in rows]}, plot)


def _runs(case: Case, cases: Sequence[tuple[float, int]], steps: int) -> Iterator[LiveRow]:
    plan = case.ours
    with (
        tempfile.TemporaryDirectory() as folder,
        open_session(plan.cluster, plan.devices, SessionOptions(), Path(folder) / "logs", SilentReporter()) as session,
    ):
        case.know(rehearse(session, case.profile.link_by_pair.values()))
        print(f"{case.model}: the runtime takes {case.profile.runtime}", flush=True)
        for left, seed in cases:
            for method in EXACT:
                yield _one(session, case, method, left, seed, steps, Path(folder))


def _one(session: Session, case: Case, method: Method, left: float, seed: int, steps: int, folder: Path) -> LiveRow:
    calm_s = case.calm_s()
    begin_s, end_s = steps / 4 * calm_s, steps * calm_s
    trace = NetworkTrace(
        text=f"{left:.0%} from {begin_s:.1f} s to {end_s:.1f} s",
        from_file={
            link: SpeedTrace(changes=((begin_s, left), (end_s, 1.0))) for link in network_links(case.profile.cluster)
        },
    )
    outcome = train_one(session, case, method, TrainJob(steps=steps, seed=seed), folder, trace)
    figures = outcome.network_trace
    assert figures is not None, "the run had a trace"
    times = tuple((before, after - before) for before, after in pairwise((0.0, *figures.step_ends_s)))
    calm = median([seconds for at_s, seconds in times if at_s + seconds <= begin_s][1:] or [times[0][1]])
    slow = [seconds for at_s, seconds in times if begin_s <= at_s and at_s + seconds <= end_s]
    after = [seconds for at_s, seconds in times if at_s >= end_s]
    return LiveRow(
        model=case.model,
        left=left,
        method=method.name,
        seed=seed,
        samples=case.size.samples,
        calm_s=calm,
        slow_s=fmean(slow),
        settled_s=fmean(slow[_SETTLING:] or slow[-1:]),
        steps_until_calm=next((k for k, seconds in enumerate(after) if seconds <= _WITHIN * calm), None),
        bound_calm_s=case.bound_s(1.0),
        bound_s=case.bound_s(left),
        predicted_calm_s=figures.predicted_step_ends_s[0],
        real_compute=max(device.real_compute_ratio for device in outcome.devices.values()),
        begin_s=begin_s,
        end_s=end_s,
        changes=tuple(str(change) for change in outcome.plan_changes),
        losses=outcome.losses,
        steps=times,
    )


def train_one(
    session: Session,
    case: Case,
    method: Method,
    job: TrainJob,
    folder: Path,
    trace: NetworkTrace | None = None,
    reporter: Reporter | None = None,
) -> TrainOutcome:
    """Train a method's plan on workers that are there."""
    plan = case.plan(method)
    name = re.sub(r"\W+", "-", f"{case.model} {method.name} {trace.text if trace else ''} {job.seed}")
    request = TrainRequest(
        plan=plan,
        profile=case.profile,
        profile_path="",
        job=replace(job, adapter=method.adapter, allow_wire=method.allowed),
        out=folder / name,
        checkpoints=False,
        options=RunOptions(network_trace=trace),
    )
    return train(session, request, StopRequest(), reporter or SilentReporter())


def _told(row: LiveRow) -> str:
    return (
        f"{row.model} {row.left:.0%} seed {row.seed} {row.method:22} calm {row.calm_s:.3f} s "
        f"(simulated {row.predicted_calm_s:.3f}), slow {row.slow_s:.3f} s, settled {row.settled_s:.3f} s "
        f"(bound {row.bound_s:.3f}); "
        f"calm again after {row.steps_until_calm}, {len(row.changes)} changes, real compute {row.real_compute:.0%}"
    )


def _table(rows: Sequence[LiveRow], model: str, left: float) -> list[str]:
    """Return the lines of one network: means over seeds."""
    here = [row for row in rows if (row.model, row.left) == (model, left)]
    by_method = {method.name: [row for row in here if row.method == method.name] for method in EXACT}
    slow = {name: fmean(row.slow_s for row in found) for name, found in by_method.items()}
    paper, adapter = slow[EXACT[0].name], slow[EXACT[1].name]
    seeds = sorted({row.seed for row in here})
    lines = [
        f"{model}, links at {left:.0%}, live, seeds {', '.join(map(str, seeds))}; "
        f"bound {here[0].bound_s:.3f} s on slow links ({here[0].samples / here[0].bound_s:.2f} samples/s), "
        f"{here[0].bound_calm_s:.3f} s on calm ones; real "
        f"computation up to {max(row.real_compute for row in here):.0%} of emulated",
        f"{'':22} {'calm s':>7} {'slow/s':>7} {'x off':>6} {'x paper':>7} {'of bound':>8} {'settled':>8} "
        f"{'of bound':>8} {'calm after':>10} {'loss off by':>11} changes",
    ]
    for name, found in by_method.items():
        settled = fmean(row.settled_s for row in found)
        calm = fmean(row.calm_s for row in found)
        back = "/".join("-" if row.steps_until_calm is None else str(row.steps_until_calm) for row in found)
        lines.append(
            f"{name:22} {calm:7.3f} {found[0].samples / slow[name]:7.2f} {paper / slow[name]:6.2f} "
            f"{adapter / slow[name]:7.2f} {found[0].bound_s / slow[name]:8.1%} {found[0].samples / settled:8.2f} "
            f"{found[0].bound_s / settled:8.1%} {back:>10} {_loss_difference(found, by_method[EXACT[2].name]):11.1e} "
            f"{'/'.join(str(len(row.changes)) for row in found)}"
        )
    return [*lines, ""]


def _loss_difference(rows: Sequence[LiveRow], exact: Sequence[LiveRow]) -> float:
    """Return how far the losses are from those of our plan without an adapter, with the same seed: the most."""
    by_seed = {row.seed: row.losses for row in exact}
    return max(abs(a - b) for row in rows for a, b in zip(row.losses, by_seed[row.seed], strict=True))
