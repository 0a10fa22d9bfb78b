"""Print how fast one device trains under SpanTrain, beside a plain PyTorch loop: `make gpu`.

    python benchmarks/gpu.py [--backend cuda:0] [--models gpt2 llama-1b] [--stages 1 2 4] [--dtypes bfloat16]

Rows, each in processes of its own that begin with a free device:

- `plain loop`: the transformers model as it comes, autocast (`bfloat16`) or weights in bfloat16 of float32 ones that
  are updated (`bfloat16-weights`), torch's fused AdamW, gradients accumulated over micro-batches and clipped; the best
  of the micro-batch sizes;
- `1 stage`: the same model as one worker of `spantrain train`, the best of the same sizes, measured and predicted;
- `2 stages`, ...: as many workers that share the one device, so that what they send each other comes on top of the same
  work: no faster than one stage can be, and the less slower the better the runtime hides it.

Each as it is written and with layers compiled by `torch.compile`.

Real: devices, computation, gradients, messages, encryption. Links are this machine's loopback. Weights are random, and
the data is text as bytes: neither changes the work. Dropout is off, except in the rows that name it. `MFU` is 6
operations for each parameter outside of the embeddings and each token, with those of attention (12 x layers x width x
sequence), over the kind's peak.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch

from gpu_cases import CASES, Case, flop_per_token, peak_flop_per_s
from gpu_plain import JOB, WARM_UP, in_a_process, plain_loop
from results import save
from spantrain.app.profiling.profile import ProfileOptions, measure_profile
from spantrain.app.reporter import SilentReporter
from spantrain.app.session import Session, SessionOptions, open_session
from spantrain.app.training.outcome import TrainOutcome
from spantrain.app.training.requests import TrainRequest
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.config.kinds import load_kinds
from spantrain.core.cluster import Cluster, Device, Host, Site
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.profile import Profile
from spantrain.core.span import equal_spans
from spantrain.core.units import ModelSpec
from spantrain.devices.registry import open_device
from spantrain.formats.precision import DTYPES, LOW_WEIGHTS
from spantrain.models.catalog.catalog import resolve_model


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one way of training gave."""

    case: str
    way: str
    dtype: str
    compiled: bool
    micro_batch: int
    step_s: float
    tokens_per_s: float
    mfu: float
    peak_bytes: int | None = None
    forecast_bytes: int | None = None
    predicted_s: float | None = None
    host_s: float | None = None
    """Between two actions, in the median: the runtime's own time."""
    losses: tuple[float, ...] = field(default=(), repr=False)


class Bench:
    """Measures rows one after another, and keeps what came of each."""

    def __init__(self, backend: str, kind: str, dtype: str, compiled: bool, steps: int, plain: bool) -> None:
        self.backend = backend
        self.kind = kind
        self.dtype = dtype
        self.compiled = compiled
        self.steps = steps
        self.plain = plain
        self.rows: list[Row] = []

    def cluster(self, stages: int) -> Cluster:
        """Return a cluster of so many devices that are the one there is, each with its part of the memory."""
        kind = load_kinds()[self.kind]
        names = tuple(f"d{number}" for number in range(stages))
        memory_bytes = kind.memory_bytes // stages
        return Cluster(
            name="one-device",
            kinds=(kind,),
            sites=(Site(name="here", hosts=("host",), bandwidth_bytes_per_s=1e10, latency_s=20e-6),),
            hosts=(Host(name="host", site="here", devices=names),),
            devices=tuple(
                Device(
                    name=name, kind=kind.name, host="host", site="here", backend=self.backend, memory_bytes=memory_bytes
                )
                for name in names
            ),
            links=(),
        )

    def row(self, case: Case, way: str, micro_batch: int, step_s: float, **more: Any) -> Row:
        """Return a row, with what follows from its seconds."""
        per_s = case.tokens / step_s
        return Row(
            case=case.name, way=way, dtype=self.dtype, compiled=self.compiled, micro_batch=micro_batch, step_s=step_s,
            tokens_per_s=per_s, mfu=per_s * flop_per_token(case) / peak_flop_per_s(self.kind), **more,
        )  # fmt: skip

    def keep_best(self, rows: Sequence[Row]) -> None:
        """Keep and print the fastest of a way's rows."""
        if rows:
            best = min(rows, key=lambda row: row.step_s)
            self.rows.append(best)
            print(shown(best), flush=True)


# Ours.


def plan_of(profile: Profile, case: Case, dtype: str, stages: int, micro_batch: int) -> Plan:
    """Return equal stages of units, as even as their operations allow."""
    units = profile.graph.units
    total = sum(unit.forward_flop_per_sample for unit in units)
    edges, done = [0], 0.0
    for number, unit in enumerate(units[:-1], 1):
        done += unit.forward_flop_per_sample
        if len(edges) < stages and done >= total * len(edges) / stages:
            edges.append(number)
    edges.append(len(units))
    spans = equal_spans(case.global_batch, micro_batch)
    return Plan(
        cluster=profile.cluster,
        model=profile.model,
        global_batch=case.global_batch,
        dtype=dtype,
        stages=tuple(
            Stage(
                first_unit=first,
                end_unit=end,
                replicas=(
                    Replica(
                        devices=(f"d{number}",),
                        sample_share=1.0,
                        in_flight_limit=min(case.global_batch, micro_batch * (stages - number)),
                    ),
                ),
                micro_batches=spans,
            )
            for number, (first, end) in enumerate(pairwise(edges))
        ),
        schedule="1f1b",
    )


@contextmanager
def session_of(bench: Bench, stages: int, folder: Path) -> Iterator[Session]:
    """Workers for so many stages."""
    cluster = bench.cluster(stages)
    names = tuple(device.name for device in cluster.devices)
    with open_session(cluster, names, SessionOptions(network=False), folder / f"logs-{stages}", SilentReporter()) as up:
        yield up


def ours(bench: Bench, session: Session, case: Case, model: ModelSpec, stages: int, folder: Path) -> None:
    """Measure and train in so many stages, with each size of micro-batch."""
    sizes = ProfileOptions(dtype=bench.dtype, max_samples=max(case.micro_batches), use_cache=False)
    profile = measure_profile(session, model, sizes, SilentReporter())
    rows = []
    for micro_batch in case.micro_batches:
        if case.global_batch // micro_batch < stages:
            continue
        plan = plan_of(profile, case, bench.dtype, stages, micro_batch)
        out = folder / f"{case.name}-{stages}-{micro_batch}"
        try:
            outcome = run(session, plan, profile, bench.steps + WARM_UP, out)
        except Exception:  # noqa: BLE001 - the other rows are wanted all the same
            tell_of(folder)
            continue
        row = row_of(bench, case, stages, micro_batch, outcome)
        print("   ", shown(row), flush=True)
        rows.append(row)
    bench.keep_best(rows)


def tell_of(folder: Path) -> None:
    """Print what failed, with the ends of the workers' logs."""
    traceback.print_exc()
    for log in sorted(folder.glob("logs-*/*.log")):
        print(f"--- {log.name}\n{log.read_text()[-2500:]}", flush=True)


def run(session: Session, plan: Plan, profile: Profile, steps: int, folder: Path) -> TrainOutcome:
    """Train a plan."""
    job = TrainJob(steps=steps, adapter="off", **JOB)
    request = TrainRequest(plan=plan, profile=profile, profile_path="", job=job, out=folder, checkpoints=False)
    return train(session, request, StopRequest(), SilentReporter())


def row_of(bench: Bench, case: Case, stages: int, micro_batch: int, outcome: TrainOutcome) -> Row:
    """Return the figures of a run; memory is that of all its devices."""
    figures = outcome.devices.values()
    peaks = [one.peak_bytes for one in figures]
    return bench.row(
        case,
        f"{stages} stage{'s' if stages > 1 else ''}",
        micro_batch,
        outcome.step_s_measured,
        peak_bytes=None if None in peaks else sum(peak or 0 for peak in peaks),
        forecast_bytes=sum(one.peak_bytes_predicted for one in figures),
        predicted_s=outcome.step_s_predicted if stages == 1 else None,
        host_s=statistics.median(one.overhead_median_s for one in figures),
        losses=outcome.losses,
    )


def shown(row: Row) -> str:
    """Return a line of the table."""

    def gib(size_bytes: int | None) -> str:
        return "-" if size_bytes is None else f"{size_bytes / 2**30:.2f}"

    predicted = "-" if row.predicted_s is None else f"{row.predicted_s * 1e3:.1f}"
    compiled = "yes" if row.compiled else "no"
    host = "-" if row.host_s is None else f"{row.host_s * 1e6:.0f}"
    return (
        f"{row.case:16} {row.way:10} {row.dtype:16} {compiled:8} {row.micro_batch:6} {row.step_s * 1e3:9.1f} "
        f"{predicted:>9} "
        f"{row.tokens_per_s:10.0f} {row.mfu:7.1%} {gib(row.peak_bytes):>8} {gib(row.forecast_bytes):>8} {host:>8}  "
        f"{row.losses[0]:.4f} -> {row.losses[-1]:.4f}"
    )


HEAD = (
    f"{'model':16} {'way':10} {'dtype':16} {'compiled':8} {'micro':>6} {'step ms':>9} {'predicted':>9} "
    f"{'tokens/s':>10} {'MFU':>7} {'peak GiB':>8} {'forecast':>8} {'host us':>8}  loss"
)


def measure(bench: Bench, case: Case, stages: Sequence[int], folder: Path, deadline_s: float) -> None:
    """Measure all rows of a model; a row that fails says why, and the others are measured."""
    model_folder = folder / case.name
    model_folder.mkdir(parents=True)
    (model_folder / "config.json").write_text(json.dumps(case.config))
    model = resolve_model(f"hf:{model_folder}", sequence_length=case.sequence)
    model = replace(model, compiled=bench.compiled)
    plain = []
    for size in case.micro_batches if bench.plain else ():
        if time.monotonic() > deadline_s:
            print("out of time")
            return
        try:
            found = in_a_process(plain_loop, case, bench.backend, bench.dtype, size, bench.steps, bench.compiled)
        except RuntimeError as error:
            print(f"{case.name}, plain loop, {size}: {str(error).strip().splitlines()[-1]}")
            continue
        plain.append(bench.row(case, "plain loop", size, **found))
        print("   ", shown(plain[-1]), flush=True)
    bench.keep_best(plain)
    for count in stages:
        if time.monotonic() > deadline_s:
            print("out of time")
            return
        try:
            with session_of(bench, count, model_folder) as session:
                ours(bench, session, case, model, count, model_folder)
        except Exception:  # noqa: BLE001 - the other rows are wanted all the same
            tell_of(model_folder)
        gc.collect()


def device_name(backend: str) -> str:
    """Return what the device calls itself."""
    device = open_device(backend).torch_device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the processor"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cuda:0")
    parser.add_argument("--kind", default="h100", help="of the device, as kinds are called in cluster files")
    parser.add_argument("--models", nargs="+", default=["gpt2", "llama-1b"], choices=sorted(CASES))
    parser.add_argument("--micro-batches", nargs="+", type=int, help="instead of those of the model")
    parser.add_argument("--no-plain", action="store_true", help="leave the plain loop out")
    parser.add_argument("--compiled", nargs="+", default=["no", "yes"], choices=["no", "yes"], help="are layers?")
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", LOW_WEIGHTS], choices=DTYPES)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no row after so many")
    parser.add_argument("--out", default="", help="keep the figures under benchmarks/results by this name")
    options = parser.parse_args()
    deadline_s = time.monotonic() + options.seconds
    print(HEAD, flush=True)
    rows: list[Row] = []
    for name in options.models:
        case = CASES[name]
        case = replace(case, micro_batches=tuple(options.micro_batches or case.micro_batches))
        for dtype, compiled in product(options.dtypes, options.compiled):
            bench = Bench(options.backend, options.kind, dtype, compiled == "yes", options.steps, not options.no_plain)
            with tempfile.TemporaryDirectory() as folder:
                measure(bench, case, options.stages, Path(folder), deadline_s)
            rows += bench.rows
    print("\nthe best of each way\n" + HEAD)
    for row in rows:
        print(shown(row))
    if options.out:
        about = f"{device_name(options.backend)}, torch {torch.__version__}"
        save(options.out, [about, "", HEAD, *map(shown, rows)], {"about": about, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
