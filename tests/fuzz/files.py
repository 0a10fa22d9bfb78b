"""Valid files of every kind, small, and ways to spoil one: a value, the text, or the bytes."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from fuzz.mutation import corrupted, wild
from spantrain.app.training.run_folder import RunContent, write_run
from spantrain.app.training.run_record import RunRecord
from spantrain.config.artefacts import artefact_text
from spantrain.config.cluster_file import parse_cluster
from spantrain.core.action import Action, Direction, Op
from spantrain.core.checkpoint import SampleLedger, StoredFile, StoredTensor
from spantrain.core.cluster import Cluster
from spantrain.core.job import TrainJob
from spantrain.core.messages import Arrived, Decision, DeviceDecisions, Finished, StepStarted
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.planned.report import Alternative, PlanReport, Prediction, ProfileReference
from spantrain.core.profile import BandwidthCurve, BandwidthPoint, DeviceScore, Profile, RuntimeCosts, UnitTiming
from spantrain.core.shares import TensorPart
from spantrain.core.span import Span, equal_spans
from spantrain.core.trace import Trace
from spantrain.core.units import ModelSpec, TensorSpec, Unit, UnitGraph
from spantrain.cost.analytic import AnalyticLaw
from spantrain.planner.engine.predict import predict, with_best_order
from spantrain.runtime.checkpoint.manifest import Manifest
from spantrain.schedule.registry import make_policy
from testing.plans import task_of
from testing.profiles import PROVENANCE, exact_links

CLUSTER = """\
name: three
emulated_speed: 0.5
kinds:
  board:
    {peak_fp16: 1 TFLOP/s, peak_fp32: 0.5 TFLOP/s, memory: 4 GB, memory_bandwidth: 50 GB/s, power: 15 W, source: me}
sites:
  - name: a
    network: {bandwidth: 1 Gbit/s, latency: 0.1 ms}
    uplink: 80 Mbit/s
    region: aws/east
    prices: {tx2: {spot: 0.1, preemptions_per_hour: 0.05}}
    egress: {zone: 0.01, region: 0.02, internet: [{up_to: 1 TB, usd_per_gb: 0.1}, {usd_per_gb: 0.05}]}
    quotas: {tx2: 2}
    hosts:
      - {name: a, count: 2, inside: pcie, devices: {tx2: 1}}
  - name: b
    network: {bandwidth: 1 Gbit/s, latency: 0.1 ms}
    hosts:
      - name: b
        devices: [{kind: board, name: b0, memory: 2 GiB, backend: emulated}]
links:
  - {between: all, bandwidth: 50 Mbit/s, latency: 5 ms}
  - {from: a, to: b, bandwidth: 20 Mbit/s, latency: 8 ms, jitter: 1 ms, loss: 1 %}
"""
PRICES = """\
rented: {t4: 0.5, a10: {usd_per_hour: 0.9, date: 2026-11, source: me}}
owned: [tx2]
electricity: 0.2
egress: {default: 0.1, mine: {zone: 0.01, region: 0.02, internet: [{up_to: 1 TB, usd_per_gb: 0.1}, {usd_per_gb: 0.05}]}}
kinds:
  big: {peak_fp16: 1 TFLOP/s, peak_fp32: 0.5 TFLOP/s, memory: 4 GB, memory_bandwidth: 50 GB/s, power: 15 W, source: me}
offers:
  - {provider: mine, region: east, zone: a, kind: t4, per_host: 2, most: 4, on_demand: 1, spot: 0.3,
     preemptions_per_hour: 0.1, inside: pcie, network: 10 Gbit/s, latency: 1 ms, date: 2026-11, source: me}
  - {provider: lab, region: cellar, kind: big, per_host: 1, most: 1, owned: 0.3, network: 1 Gbit/s}
"""
OUTER = """\
name: here
master: {address: "127.0.0.1:29500", state: state/master, listen: 0.0.0.0}
shards:
  - {name: s0, address: "127.0.0.1:29600", snapshots: state/s0}
  - {name: s1, address: "[::1]:29600", snapshots: state/s1}
inner_steps: 16
rule: {learning_rate: 0.7, momentum: 0.9}
settings: {grace: 5 s, clip_norm: 1.5, ahead: 0.5, lease: 60 s, push_format: int8, fragments: 2}
guard: {smoothing: 0.9, factor: 3, warm_up: 8, restart_after: 5}
data: {samples: 1000, chunk_samples: 10, passes: 3}
encryption: on
placement:
  model: 500 MB
  clusters: [{name: c0, tokens_per_s: 100, line: 1 Gbit/s}, {name: c1, tokens_per_s: 10}]
  places:
    - {name: p0, bandwidth: {c0: 1 Gbit/s, c1: 10 Mbit/s}, memory: 8 GiB}
    - {name: p1, bandwidth: {c0: 10 Mbit/s, c1: 1 Gbit/s}}
"""


def _graph() -> UnitGraph:
    names = ("transformer", "transformer.h.0", "transformer.h.1", "lm_head")
    hidden = TensorSpec(name="hidden", shape_per_sample=(64, 64), dtype="float32", bytes_per_sample=16384)
    return UnitGraph(
        units=tuple(
            Unit(
                name=name,
                unit_class="block" if ".h." in name else name,
                parameter_bytes=200_000,
                forward_flop_per_sample=1e7,
                outputs=() if name == "lm_head" else (hidden,),
                activation_bytes_per_sample=100_000,
                shared=("wte",) if ".h." not in name else (),
                tensor_sums=2 if ".h." in name else 0,
                deferred_bytes_per_sample=50_000,
            )
            for name in names
        ),
        shared_bytes={"wte": 65536},
        input_bytes_per_sample=512,
    )


def _timings(cluster: Cluster, graph: UnitGraph) -> tuple[UnitTiming, ...]:
    laws = [AnalyticLaw(kind=kind, speed=cluster.emulated_speed, dtype="float32") for kind in cluster.kinds]
    units = {unit.unit_class: unit for unit in graph.units}
    return tuple(
        UnitTiming(
            unit_class=name,
            kind=law.kind.name,
            dtype="float32",
            samples=samples,
            forward_s=law.seconds(unit, Op.FORWARD, samples),
            backward_input_s=law.seconds(unit, Op.BACKWARD_INPUT, samples),
            backward_weight_s=law.seconds(unit, Op.BACKWARD_WEIGHT, samples),
        )
        for name, unit in units.items()
        for law in laws
        for samples in (1, 4)
    )


@cache
def profile() -> Profile:
    """Three devices at two places, a model of four units."""
    cluster, graph = parse_cluster(CLUSTER, source="three"), _graph()
    points = tuple(BandwidthPoint(size_bytes=n, bandwidth_bytes_per_s=rate) for n, rate in ((1000, 1e5), (10**6, 2e6)))
    first, *links = exact_links(cluster)
    return Profile(
        cluster=cluster,
        model=ModelSpec(
            name="gpt2-tiny",
            family="gpt2",
            config={"n_layer": 2, "n_embd": 64, "vocab_size": 256, "n_positions": 64, "n_head": 4},
            dataset="stdlib-text",
            sequence_length=64,
        ),
        graph=graph,
        dtype="float32",
        timings=_timings(cluster, graph),
        links=(replace(first, curve=BandwidthCurve(points=points)), *links),
        scores=tuple(DeviceScore(device=d.name, score=1.0, task_s={"mlp": 0.1}) for d in cluster.devices),
        provenance=PROVENANCE,
        runtime=RuntimeCosts(action_s=1e-4, message_s=1e-3, step_end_s=1e-2),
    )


@cache
def plan() -> Plan:
    """Two replicas, then one, that follow an order of work."""
    found = Plan(
        cluster=profile().cluster,
        model=profile().model,
        global_batch=4,
        dtype="float32",
        stages=(
            Stage(
                first_unit=0,
                end_unit=2,
                replicas=(
                    Replica(devices=("a-0",), sample_share=2.0, in_flight_limit=4),
                    Replica(devices=("a-1",), sample_share=1.0, in_flight_limit=4),
                ),
                micro_batches=equal_spans(4, 2),
            ),
            Stage(
                first_unit=2,
                end_unit=4,
                replicas=(Replica(devices=("b0",), sample_share=1.0, in_flight_limit=4),),
                micro_batches=equal_spans(4, 1),
                recompute=(2,),
            ),
        ),
        schedule="critical-path",
        profile=ProfileReference(path="profile.json", sha256="0" * 64),
    )
    return with_best_order(found, profile())


def report() -> PlanReport:
    return PlanReport(
        prediction=Prediction(step_s=1.0, samples_per_s=8.0, peak_bytes={"a-0": 10**6}, method="simulated"),
        alternatives=(Alternative(name="alone", devices=("a-0",), step_s=2.0, samples_per_s=4.0, reason="slower"),),
        reasons=("it is quicker",),
    )


def _decided(trace: Trace, device: str) -> DeviceDecisions:
    """What a device's policy answers to what a trace has happen."""
    policy = make_policy(plan().schedule, task_of(plan(), device))
    decisions = []
    for step in (1, 2):
        actions = [one for one in trace.of(device, step=step) if one.name != "update"]
        told: list[Any] = [(one.end_s, 1, Finished(Action.parse(one.name))) for one in actions]
        for flow in trace.flows:
            if flow.target == device and flow.step == step and "/cut" in flow.name:
                lane, span = flow.name.split("/")[2:4]
                told.append((flow.received_s, 0, Arrived(Direction(lane), Span.parse(span[span.index("[") :]))))
        told.append((min(time_s for time_s, _, _ in told) - 1e-6, -1, StepStarted(step)))
        for time_s, _, event in sorted(told, key=lambda entry: entry[:2]):
            decisions.append(Decision.of(step, time_s, event, policy.on_event(time_s, event)))
    return DeviceDecisions(device=device, trace_shift_s=0.0, decisions=tuple(decisions))


@cache
def run_files() -> Mapping[str, str]:
    """What a run leaves in its folder, by the name of the file; the manifest of its checkpoint among it."""
    trace = predict(plan(), profile()).trace.since(1)
    record = RunRecord(
        plan="", profile="", optimizer="adamw", steps_measured=2, step_s=2.0, slowest_step_s=2.0, fastest_step_s=2.0,
        busy_s=dict.fromkeys(plan().devices, 1.0), peak_held_samples=dict.fromkeys(plan().devices, 4),
        peak_bytes={"a-0": 10**6},
    )  # fmt: skip
    decisions = tuple(_decided(trace, device) for device in plan().devices)
    content = RunContent(
        plan=plan(), report=report(), profile=profile(), record=record, trace=trace, decisions=decisions
    )
    with TemporaryDirectory() as folder:
        write_run(Path(folder), content)
        found = {path.name: path.read_text() for path in sorted(Path(folder).iterdir())}
    return found | {"manifest.json": _manifest()}


def _manifest() -> str:
    tensors = {"parameter/lm_head.weight": StoredTensor(part=TensorPart(full_shape=(4, 2)), dtype="float32")}
    manifest = Manifest(
        step=3,
        model=plan().model,
        plan=plan(),
        report=report(),
        job=TrainJob(steps=3),
        profile="profile.json",
        losses=(3.0, 2.0, 1.0),
        ledger=SampleLedger().extended(0, 4),
        scalars={"loss_scale": 1024.0},
        files={"a-0-0.safetensors": StoredFile(device="a-0", sha256="0" * 64, size_bytes=40, tensors=tensors)},
    )
    return artefact_text(manifest, "spantrain-checkpoint")


# Spoiling: of a value one thing, of a text what no value has, of bytes any.

_STRANGE_NUMBERS = ("1e400", "-1e400", "1e-320", "-0.0", "9" * 400, "9" * 5000, "NaN", "Infinity", "1" + "0" * 18)
_LARGE = (10**6, 10**9, 2**62, 1e30, 1e-50, 0.1, 3)


def spoiled(chance: Random, text: str, *, times: int = 1) -> bytes:
    """Return the bytes of a JSON file with something wrong in it, mostly one value."""
    kind = chance.random()
    if kind < 0.05:
        return corrupted(chance, text.encode())
    value = json.loads(text)
    for _ in range(times):
        value = _with_change(chance, value)
    found = json.dumps(value, default=lambda one: one.decode("latin-1"))
    return spoiled_text(chance, found) if kind < 0.15 else found.encode("utf-8", "surrogatepass")


def _with_change(chance: Random, value: Any) -> Any:
    """Walk down to some place and change what is there; all levels are as likely, however many values one has."""
    at, path = value, []
    while isinstance(at, dict | list) and at and chance.random() < 0.85:
        path.append(chance.choice(list(at)) if isinstance(at, dict) else chance.randrange(len(at)))
        at = at[path[-1]]
    if not path:
        return _other(chance, value)
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    if chance.random() < 0.1:
        del holder[path[-1]]
    else:
        holder[path[-1]] = _other(chance, at)
    return value


def _other(chance: Random, value: Any) -> Any:
    """Return what may stand in the place of a value: of its own type more often than not."""
    if chance.random() < 0.15:
        return wild(chance)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        near = (value + 1, value - 1, -value, value * 2, value / 3, 0, type(value)(2) ** 40, *_LARGE)
        return chance.choice(near)
    if isinstance(value, str):
        return chance.choice(
            (value[:-1], value + "x", value + value, "../../x", "a-0", "b0", "a-9", "[0:4]", "1f1b", "")
        )
    if isinstance(value, list):
        return chance.choice(
            (value[:-1], value[1:], value + value, value[::-1], value * 30, [*value, wild(chance)], [])
        )
    if isinstance(value, dict):
        renamed = {(key if chance.random() < 0.8 else key + "x"): entry for key, entry in value.items()}
        return chance.choice((renamed, {**value, "new": wild(chance)}, dict(list(value.items())[1:]), {}))
    return chance.choice((0, 1, "x", [], {}, 1.5))


def spoiled_text(chance: Random, text: str) -> bytes:
    """Return the bytes of a text with something in it that no value has."""
    at = chance.randrange(len(text) + 1)
    act = chance.randrange(9)
    if act == 0:
        return text[:at].encode()
    if act == 1:
        return b"\xef\xbb\xbf" + text.encode()
    if act == 2:
        return text.encode("utf-16")
    if act == 3:
        return text.encode() + b"\xff"
    if act == 4:
        return text.replace('"', '"\\ud800' if chance.random() < 0.5 else '"\\u0000', 3).encode()
    if act == 5:
        return (text[:at] + chance.choice(("[", '{"a": ', "- ")) * 3000 + text[at:]).encode()
    if act == 6:
        keys = ", ".join(f'"k{number % 900}": 1' for number in range(1000))
        return (text[:at] + "{" + keys + "}" + text[at:]).encode()
    if act == 7:
        numbers = [index for index, one in enumerate(text) if one.isdigit()] or [0]
        place = chance.choice(numbers)
        return (text[:place] + chance.choice(_STRANGE_NUMBERS) + text[place + 1 :]).encode()
    strange = ("\0", "&a [*a]", "*x", "<<: *x", "!!python/name:os.system", "\t", "{", "]", "\u2028")
    return (text[:at] + chance.choice(strange) + text[at:]).encode()


def spoiled_yaml(chance: Random, text: str) -> bytes:
    """Change words of a text, its bytes, or put in what no value has."""
    kind = chance.random()
    if kind < 0.15:
        return corrupted(chance, text.encode())
    if kind < 0.35:
        return spoiled_text(chance, text)
    words = (
        "0", "-1", "1e400 Gbit/s", "0 s", "1e-70 s", "99999999999999999999", "1024", "../../x", "{}", "[]", "a", "b0",
        "tx2", "null", "~", "'", "1e308 GB", "1 %", "100 %", "cuda:1", "x" * 100, "&y [1]", "*y", "all", "name",
    )  # fmt: skip
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        begins = [index for index in range(1, len(text)) if text[index].isalnum() and not text[index - 1].isalnum()]
        begin = chance.choice(begins or [0])
        end = next((i for i in range(begin, len(text)) if text[i] in ",}]\n:"), len(text))
        other = chance.choice(words) if chance.random() < 0.7 else text[chance.choice(begins or [0]) :][: end - begin]
        text = text[:begin] + other + text[end:]
    return text.encode("utf-8", "surrogatepass")
