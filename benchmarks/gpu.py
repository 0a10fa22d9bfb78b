"""Print how fast one device trains under SpanTrain, beside a plain PyTorch loop: `make gpu`.

    python benchmarks/gpu.py [--backend cuda:0] [--models gpt2 llama-1b] [--stages 1 2 4] [--steps 8]

Rows, each in processes of its own that begin with a free device:

- `plain loop`: the transformers model as it comes, autocast, torch's fused AdamW, gradients accumulated over
  micro-batches and clipped; the best of the micro-batch sizes;
- `1 stage`: the same model as one worker of `spantrain train`, the best of the same sizes, measured and predicted;
- `2 stages`, ...: as many workers that share the one device, so that what they send each other comes on top of the same
  work: no faster than one stage can be, and the less slower the better the runtime hides it.

Real: devices, computation, gradients, messages, encryption. Links are this machine's loopback. Weights are random, and
the data is text as bytes: neither changes the work. Dropout is off, except in the rows that name it. `MFU` is 6
operations for each parameter outside of the embeddings and each token, with those of attention (12 x layers x width x
sequence), over the kind's peak.
"""

import argparse
import gc
import json
import multiprocessing
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

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
from spantrain.models.catalog.catalog import resolve_model

JOB = {"learning_rate": 3e-4, "warmup_steps": 0, "max_grad_norm": 1.0}
WARM_UP = 2
"""Steps that count in no row."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model, and how it is trained."""

    name: str
    config: dict[str, Any]
    """Of transformers."""
    sequence: int
    global_batch: int
    micro_batches: tuple[int, ...]
    dropout: float = 0.0

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.global_batch * self.sequence


def gpt2(name: str, **changes: Any) -> Case:
    """GPT-2 small, or smaller."""
    size = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024} | changes
    drops = size.pop("dropout", 0.0)
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **size}
    config |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), drops)
    return Case(
        name=name, config=config, sequence=size["n_positions"], global_batch=64, micro_batches=(8, 16, 32),
        dropout=drops,
    )  # fmt: skip


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
CASES = {
    case.name: case
    for case in (
        gpt2("gpt2"),
        gpt2("gpt2-dropout", dropout=0.1),
        replace(gpt2("gpt2-small-batch"), global_batch=8, micro_batches=(2, 4)),
        Case(
            name="llama-1b",
            config={
                **LLAMA, "hidden_size": 2048, "num_hidden_layers": 20, "num_attention_heads": 16,
                "num_key_value_heads": 8, "intermediate_size": 5632, "vocab_size": 32000,
                "max_position_embeddings": 2048,
            },
            sequence=1024,
            global_batch=32,
            micro_batches=(4, 8),
        ),
        # For a look at the script on a processor.
        replace(
            gpt2("tiny", n_layer=4, n_embd=64, n_head=4, vocab_size=300, n_positions=64),
            global_batch=16, micro_batches=(4, 8),
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one way of training gave."""

    case: str
    way: str
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

    def __init__(self, backend: str, kind: str, dtype: str, steps: int, plain: bool) -> None:
        self.backend = backend
        self.kind = kind
        self.dtype = dtype
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
            case=case.name, way=way, micro_batch=micro_batch, step_s=step_s, tokens_per_s=per_s,
            mfu=per_s * flop_per_token(case) / peak_flop_per_s(self.kind), **more,
        )  # fmt: skip

    def keep_best(self, rows: Sequence[Row]) -> None:
        """Keep and print the fastest of a way's rows."""
        if rows:
            best = min(rows, key=lambda row: row.step_s)
            self.rows.append(best)
            print(shown(best), flush=True)


def peak_flop_per_s(kind: str) -> float:
    """Return the kind's 16-bit rate."""
    return load_kinds()[kind].peak_fp16_flop_per_s


def flop_per_token(case: Case) -> float:
    """Return the operations of a training step for one token, as MFU counts them."""
    c = case.config
    width = c.get("n_embd") or c["hidden_size"]
    layers = c.get("n_layer") or c["num_hidden_layers"]
    if c["model_type"] == "gpt2":
        block = 12 * width * width
    else:
        heads, keys = c["num_attention_heads"], c["num_key_value_heads"]
        block = width * width * (2 + 2 * keys / heads) + 3 * width * c["intermediate_size"]
    head = width * c["vocab_size"]
    return 6.0 * (layers * block + head) + 12.0 * layers * width * case.sequence


# The plain loop.


def plain_loop(case: Case, backend: str, dtype: str, micro_batch: int, steps: int) -> dict[str, Any]:
    """Train as a PyTorch user does; return seconds of steps, the peak, and the losses."""
    from transformers import AutoConfig, AutoModelForCausalLM

    device = open_device(backend).torch_device
    fields = {key: value for key, value in case.config.items() if key not in ("model_type", "architectures")}
    config = AutoConfig.for_model(case.config["model_type"], use_cache=False, **fields)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=JOB["learning_rate"], weight_decay=0.01,
                                  fused=device.type == "cuda")  # fmt: skip
    tokens = torch.randint(0, 256, (case.global_batch, case.sequence), device=device)
    seconds: list[float] = []
    losses: list[float] = []
    for _ in range(steps + WARM_UP):
        start_s = time.perf_counter()
        total = torch.zeros((), device=device)
        for part in tokens.split(micro_batch):
            with torch.autocast(device.type, getattr(torch, dtype), enabled=dtype != "float32"):
                loss = model(input_ids=part, labels=part).loss * (len(part) / case.global_batch)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), JOB["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(total))
        seconds.append(time.perf_counter() - start_s)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"step_s": statistics.median(seconds[WARM_UP:]), "peak_bytes": peak, "losses": tuple(losses)}


def _child(results: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        results.put((True, function(*arguments)))
    except BaseException:  # noqa: BLE001 - told to who waits for it
        results.put((False, traceback.format_exc()))


def in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function gives in a process of its own.

    Raises:
        RuntimeError: it failed there.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_child, args=(results, function, arguments), daemon=True)
    process.start()
    good, found = results.get()
    process.join()
    if not good:
        raise RuntimeError(found)
    return found


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
            traceback.print_exc()
            continue
        row = row_of(bench, case, stages, micro_batch, outcome)
        print("   ", shown(row), flush=True)
        rows.append(row)
    bench.keep_best(rows)


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
    host = "-" if row.host_s is None else f"{row.host_s * 1e6:.0f}"
    return (
        f"{row.case:18} {row.way:12} {row.micro_batch:6} {row.step_s * 1e3:9.1f} {predicted:>9} "
        f"{row.tokens_per_s:10.0f} {row.mfu:7.1%} {gib(row.peak_bytes):>8} {gib(row.forecast_bytes):>8} {host:>8}  "
        f"{row.losses[0]:.4f} -> {row.losses[-1]:.4f}"
    )


HEAD = (
    f"{'model':18} {'way':12} {'micro':>6} {'step ms':>9} {'predicted':>9} {'tokens/s':>10} {'MFU':>7} {'peak GiB':>8} "
    f"{'forecast':>8} {'host us':>8}  loss"
)


def measure(bench: Bench, case: Case, stages: Sequence[int], folder: Path, deadline_s: float) -> None:
    """Measure all rows of a model; a row that fails says why, and the others are measured."""
    model_folder = folder / case.name
    model_folder.mkdir(parents=True)
    (model_folder / "config.json").write_text(json.dumps(case.config))
    model = resolve_model(f"hf:{model_folder}", sequence_length=case.sequence)
    plain = []
    for size in case.micro_batches if bench.plain else ():
        if time.monotonic() > deadline_s:
            print("out of time")
            return
        try:
            found = in_a_process(plain_loop, case, bench.backend, bench.dtype, size, bench.steps)
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
            traceback.print_exc()
            for log in sorted((model_folder / f"logs-{count}").glob("*.log")):
                print(f"--- {log.name}\n{log.read_text()[-1500:]}")
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
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no row after so many")
    parser.add_argument("--out", default="", help="keep the figures under benchmarks/results by this name")
    options = parser.parse_args()
    deadline_s = time.monotonic() + options.seconds
    bench = Bench(options.backend, options.kind, options.dtype, options.steps, not options.no_plain)
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            case = CASES[name]
            case = replace(case, micro_batches=tuple(options.micro_batches or case.micro_batches))
            measure(bench, case, options.stages, Path(folder), deadline_s)
    print("\nthe best of each way\n" + HEAD)
    for row in bench.rows:
        print(shown(row))
    if options.out:
        about = [f"{device_name(bench.backend)}, torch {torch.__version__}, {bench.dtype} by autocast", "", HEAD]
        rows = [asdict(row) for row in bench.rows]
        save(options.out, [*about, *map(shown, bench.rows)], {"about": about[0], "rows": rows})


if __name__ == "__main__":
    main()
