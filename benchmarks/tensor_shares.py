"""Step times of one stage divided among unlike devices: unequal tensor shares, equal ones, one device; and predicted.

    python benchmarks/tensor_shares.py [--steps 8] [--only NAME[;NAME...]] [--loopback] [--json] [--runs FOLDER]

A stack of GPT-2 blocks, whole, on devices whose speeds are 1, 2 and 4: one of them; two, in a group with equal shares
of each layer and with shares by speed; three; and the grid of figure 7c of the SpanTrain paper, two groups with samples
and tensors 1:2 each, whose parts are a third or two thirds of the batch by a third or two thirds of each layer. The
prediction is the one that `spantrain train` makes: links and the runtime's own costs are measured before any run, and
seconds of computation are by the law that emulated devices follow, divided by shares (`cost.compute`).

Emulated: devices' time (the computation is real, on parts of the parameters), and, unless --loopback, the network
between the hosts. Real: one process for each device, all sums, gathered losses, gradients, barriers.
Bound of the project: with unequal shares, the step time is within 5 % of the prediction. Where real computation takes
over 30 % of the emulated time, times are this machine's: such a run is made again, at most twice, whatever its error.
"""

import argparse
import contextlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from accuracy_plans import law_timings
from spantrain.app.profiling.profile import ProfileOptions, measure_profile
from spantrain.app.profiling.slowing import MAX_REAL_COMPUTE
from spantrain.app.reporter import SilentReporter
from spantrain.app.session import Session, SessionOptions, open_session
from spantrain.app.training.requests import TrainRequest
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.core.cluster import Cluster, Device, DeviceKind, Host, Site
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.profile import Profile
from spantrain.core.span import equal_spans
from spantrain.core.units import ModelSpec
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.graph import build_graph

BOUND = 0.05
SPEEDS = {"slow": 1.0, "middle-0": 2.0, "middle-1": 2.0, "fast": 4.0}
GLOBAL_BATCH, MICRO_BATCH = 18, 6
_BASE_FLOP_PER_S = 0.4e9
"""So that the fastest takes five seconds for a step alone: many times what the real computation takes."""
_MOST_TRIES = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """Groups of devices with their shares."""

    name: str
    groups: tuple[tuple[str, ...], ...]
    tensor_shares: tuple[tuple[float, ...], ...]
    sample_shares: tuple[float, ...] = (1.0,)


CASES = (
    Case(name="one fast", groups=(("fast",),), tensor_shares=((1.0,),)),
    Case(name="two, equal", groups=(("fast", "middle-0"),), tensor_shares=((1.0, 1.0),)),
    Case(name="two, 2:1", groups=(("fast", "middle-0"),), tensor_shares=((2.0, 1.0),)),
    Case(name="three, equal", groups=(("fast", "middle-0", "slow"),), tensor_shares=((1.0, 1.0, 1.0),)),
    Case(name="three, 4:1:1", groups=(("fast", "middle-0", "slow"),), tensor_shares=((4.0, 1.0, 1.0),)),
    Case(
        name="figure 7c, equal",
        groups=(("middle-0", "slow"), ("fast", "middle-1")),
        tensor_shares=((1.0, 1.0), (1.0, 1.0)),
        sample_shares=(1.0, 1.0),
    ),
    Case(
        name="figure 7c, 2:1 by 2:1",
        groups=(("middle-0", "slow"), ("fast", "middle-1")),
        tensor_shares=((2.0, 1.0), (2.0, 1.0)),
        sample_shares=(1.0, 2.0),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came of one case."""

    name: str
    predicted_s: float
    measured_s: float
    error: float
    """Predicted over measured, less one."""
    real_compute_ratio: float


def main() -> None:
    """Run the cases, print the table."""
    options = _options()
    wanted = [case for case in CASES if not options.only or case.name in options.only.split(";")]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch, contextlib.suppress(KeyboardInterrupt):
        for row in _run_all(wanted, options, Path(options.runs or scratch)):
            rows.append(row)
            _say(
                f"{row.name:24} predicted {row.predicted_s:7.3f} s  measured {row.measured_s:7.3f} s  error "
                f"{row.error:+6.1%}  real {row.real_compute_ratio:4.0%}"
            )
    worst = max((abs(row.error) for row in rows), default=1.0)
    _say(f"worst error {worst:.1%} (bound {BOUND:.0%}); load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    if options.json:
        print(
            json.dumps({"worst": worst, "load": os.getloadavg()[0], "cases": [asdict(row) for row in rows]}, indent=2)
        )
    raise SystemExit(0 if worst <= BOUND and len(rows) == len(wanted) else 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="of each run; the first two are not measured")
    parser.add_argument("--only", default="", metavar="NAMES", help="cases, with semicolons between them")
    parser.add_argument("--loopback", action="store_true", help="all devices on one loopback, with no network between")
    parser.add_argument("--json", action="store_true", help="one object on standard output, progress to standard error")
    parser.add_argument("--runs", default="", help="keep the folders of the runs here")
    return parser.parse_args()


def _run_all(cases: Sequence[Case], options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    cluster, model = _cluster(), _model()
    devices = tuple(name for name in SPEEDS if any(name in group for case in cases for group in case.groups))
    settings = SessionOptions(network=not options.loopback)
    generations = itertools.count(1)
    with open_session(cluster, devices, settings, folder / "logs", SilentReporter()) as session:
        profile = _profile(session, model)
        for case in cases:
            for _ in range(_MOST_TRIES):
                row = _run(session, profile, case, next(generations), options.steps, folder / case.name)
                if row.real_compute_ratio <= MAX_REAL_COMPUTE:
                    break
            yield row


def _profile(session: Session, model: ModelSpec) -> Profile:
    """Measure links and the runtime's costs; take the seconds of computation from the law."""
    options = ProfileOptions(max_samples=1, use_cache=False)
    measured = measure_profile(session, resolve_model("gpt2-tiny"), options, SilentReporter())
    graph = build_graph(model)
    timings = law_timings(session.cluster, graph, range(1, GLOBAL_BATCH + 1))
    return replace(measured, model=model, graph=graph, timings=timings)


def _run(session: Session, profile: Profile, case: Case, generation: int, steps: int, folder: Path) -> Row:
    plan = _plan(session.cluster, profile, case, generation)
    request = TrainRequest(
        plan=plan,
        profile=profile,
        profile_path="",
        job=TrainJob(steps=steps, adapter="off"),
        out=folder,
        checkpoints=False,
    )
    outcome = train(session, request, StopRequest(), SilentReporter())
    return Row(
        name=case.name,
        predicted_s=outcome.step_s_predicted,
        measured_s=outcome.step_s_measured,
        error=outcome.step_s_predicted / outcome.step_s_measured - 1.0,
        real_compute_ratio=max(figures.real_compute_ratio for figures in outcome.devices.values()),
    )


def _plan(cluster: Cluster, profile: Profile, case: Case, generation: int) -> Plan:
    replicas = tuple(
        Replica(devices=group, tp_shares=tensor, sample_share=samples, in_flight_limit=GLOBAL_BATCH)
        for group, tensor, samples in zip(case.groups, case.tensor_shares, case.sample_shares, strict=True)
    )
    stage = Stage(
        first_unit=0,
        end_unit=len(profile.graph.units),
        replicas=replicas,
        micro_batches=equal_spans(GLOBAL_BATCH, MICRO_BATCH),
    )
    return Plan(
        cluster=cluster,
        model=profile.model,
        global_batch=GLOBAL_BATCH,
        dtype="float32",
        stages=(stage,),
        schedule="1f1b",
        generation=generation,
    )


def _model() -> ModelSpec:
    """Return four blocks with six heads, whose layers divide into thirds and sixths."""
    spec = resolve_model("gpt2-tiny")
    return replace(spec, name="four GPT-2 blocks", config={**spec.config, "n_layer": 4, "n_embd": 96, "n_head": 6})


def _cluster() -> Cluster:
    kinds = {
        f"speed-{speed:g}": DeviceKind(
            name=f"speed-{speed:g}",
            peak_fp16_flop_per_s=speed * _BASE_FLOP_PER_S,
            peak_fp32_flop_per_s=speed * _BASE_FLOP_PER_S,
            memory_bytes=2**32,
            memory_bandwidth_bytes_per_s=1e12,
            power_w=0.0,
            source="made up: so many times the slowest one's speed",
        )
        for speed in SPEEDS.values()
    }
    return Cluster(
        name="tensor-shares",
        kinds=tuple(kinds.values()),
        sites=(Site(name="here", hosts=tuple(SPEEDS), bandwidth_bytes_per_s=1e9 / 8, latency_s=2e-4),),
        hosts=tuple(Host(name=name, site="here", devices=(name,)) for name in SPEEDS),
        devices=tuple(
            Device(name=name, kind=f"speed-{speed:g}", host=name, site="here", backend="emulated", memory_bytes=2**32)
            for name, speed in SPEEDS.items()
        ),
        links=(),
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr if "--json" in sys.argv else sys.stdout, flush=True)


if __name__ == "__main__":
    main()
