"""All that reads files, each with a generator of spoiled ones, and what a command does with them once they are read."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from fuzz.files import CLUSTER, OUTER, PRICES, plan, profile, run_files, spoiled, spoiled_yaml
from fuzz.mutation import corrupted
from fuzz.target import Target
from spantrain.app.outer.join import place_outer
from spantrain.app.planning.explain import explain_plan
from spantrain.app.planning.plan_files import open_plan
from spantrain.app.renting.candidates import cluster_text, single_offers
from spantrain.app.simulation.schedule import check_order_file, show_plan
from spantrain.app.simulation.simulate import SimulateRequest, run_simulation
from spantrain.app.training.requests import new_run, resumed_run
from spantrain.app.validate_run import validate_run
from spantrain.config.artefacts import read_profile
from spantrain.config.cluster_file import load_cluster, parse_cluster
from spantrain.config.files.json_codec import render_json, to_json
from spantrain.config.prices import read_prices
from spantrain.config.traces.network_traces import Changes, changes_text, network_links, network_trace, read_changes
from spantrain.core.job import TrainJob
from spantrain.core.outer.layers import Layer, ParameterSpec, divide
from spantrain.core.speed import SpeedTrace
from spantrain.cost.analytic import analytic_profile
from spantrain.errors import SpanTrainError
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.data.choice import vocabulary_size
from spantrain.models.data.text import ByteEncoder, document_parts
from spantrain.outer.master.config import MasterConfig
from spantrain.outer.master.files import MasterFiles
from spantrain.outer.outer_file import load_outer, parse_outer
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.groups import group_devices
from spantrain.planner.request import JobSpec
from spantrain.schedule.render.text import format_orders
from spantrain.sim.costs import ProfileCosts
from spantrain.sim.engine import simulate
from spantrain.testbed.control import read_states
from spantrain.transport.control.credentials import Credentials
from spantrain_studies.reference.validate import validate_reference
from testing.reference import case, files

Files = Mapping[str, bytes]
_KEPT = ("credentials.json", "lock", "token")
"""Files of a master's that take long to make."""
_SMALL = 12
"""Devices of a cluster that is planned for: more are no fault, but take their time."""
_FEW = 64
"""Micro-batches of a plan whose every change is simulated."""


def written(case: Files, folder: Path) -> Path:
    """Write files in the place of those of the case before."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file() and path.name not in _KEPT:
            path.unlink()
    for name, content in case.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o600)
    return folder


def file_target(
    name: str, make: Callable[[Random], Files], run: Callable[[Path], object], *, most_s: float = 2.0
) -> Target:
    """Return a target whose cases are files."""
    return Target(
        name=name, make=make, run=lambda case, folder: run(written(case, folder)), refusals=(SpanTrainError,),
        most_s=most_s,
    )  # fmt: skip


# Clusters, networks, the outer optimizer: YAML


def run_cluster(folder: Path) -> None:
    cluster = load_cluster(folder / "c.yaml")
    network_links(cluster)
    to_json(cluster)
    if len(cluster.devices) <= _SMALL:
        found = analytic_profile(cluster, profile().model, profile().graph, most_samples=8)
        group_devices(found)
        make_plan(found, JobSpec(global_batch=8), PlanOptions(strategies=("single-device",)))


def run_prices(folder: Path) -> None:
    found = read_prices(folder / "p.yaml")
    for candidate in single_offers(found.table.offers, {}):
        parse_cluster(cluster_text(candidate, found), source="rented")


def run_changes(folder: Path) -> None:
    changes = read_changes(folder / "changes.yaml")
    run_simulation(SimulateRequest(plan=plan(), profile=profile(), schedules=("1f1b",), steps=2, changes=changes))
    network_trace(str(folder / "changes.yaml")).on(plan().cluster, 100.0)


def changes_case(chance: Random) -> Files:
    speeds = {"a->b": SpeedTrace(changes=((0.0, 0.5), (2.5, 0.0), (4.0, 1.0)))}
    devices = {"a-0": SpeedTrace(changes=((1.0, 0.25),))} if chance.random() < 0.5 else {}
    text = changes_text(Changes(link_speed=speeds, device_speed=devices))
    return {"changes.yaml": spoiled_yaml(chance, text)}


def trace_name(chance: Random) -> Files:
    known = ("drop-50", "square", "random-walk", "diurnal", "burst", "outage-30", "drop-60:from=10s,until=40s")
    text = chance.choice(known)
    for _ in range(chance.choice((0, 1, 1, 2))):
        at = chance.randrange(len(text) + 1)
        more = (
            "from=",
            "9" * 30,
            "%",
            "-1",
            "nan",
            ":",
            ",",
            "seed=1e400",
            "period=1e-9s",
            "low=1e-80",
            "links=a->b",
            "=",
        )
        text = text[:at] + chance.choice(more) + text[at + chance.randrange(2) :]
    return {"name": text.encode()}


def run_trace_name(folder: Path) -> None:
    network_trace((folder / "name").read_text()).on(plan().cluster, 100.0)


def run_outer(folder: Path) -> None:
    config = load_outer(folder / "outer.yaml")
    assert config.for_master
    if config.places is not None:
        place_outer(config)


# Plans and profiles, with what is done with them


def plan_case(chance: Random) -> Files:
    """A spoiled plan, a spoiled profile, or both; the plan names the profile that lies there."""
    known = run_files()
    kind = chance.random()
    measured = known["profile.json"].encode() if kind < 0.6 else spoiled(chance, known["profile.json"])
    sha256 = [hashlib.sha256(content).hexdigest() for content in (known["profile.json"].encode(), measured)]
    planned = known["plan.json"].replace(*sha256)
    whole = spoiled(chance, planned) if kind < 0.7 else planned.encode()
    return {"plan.json": whole, "profile.json": measured}


def profile_case(chance: Random) -> Files:
    return {"profile.json": spoiled(chance, run_files()["profile.json"])}


def run_simulated(folder: Path) -> None:
    found, measured = open_plan(folder / "plan.json")
    schedules = tuple(dict.fromkeys((found.schedule, "1f1b", "zb")))
    run_simulation(SimulateRequest(plan=found, profile=measured, schedules=schedules, steps=2))


def run_shown(folder: Path) -> None:
    show_plan("critical-path", folder / "plan.json")


def run_explained(folder: Path) -> None:
    found, measured = open_plan(folder / "plan.json")
    if all(len(stage.micro_batches) <= _FEW for stage in found.stages):
        explain_plan(found, measured)


def run_asked_for(folder: Path) -> None:
    new_run(folder / "plan.json", TrainJob(steps=1), folder, functions=(), schedule="gpipe")


def run_planned(folder: Path) -> None:
    found = read_profile(folder / "profile.json")
    group_devices(found)
    make_plan(found, JobSpec(global_batch=8), PlanOptions(strategies=("single-device", "gpipe")))


# Runs and checkpoints


def run_folder_case(chance: Random) -> Files:
    known = dict(run_files())
    name = chance.choice(("run.json", "trace.json", "trace.json", "decisions.jsonl", "decisions.jsonl", "plan.json"))
    found = {other: known[other].encode() for other in ("run.json", "trace.json", "plan.json", "profile.json")}
    found["decisions.jsonl"] = known["decisions.jsonl"].encode()
    if name != "decisions.jsonl":
        return found | {name: spoiled(chance, known[name])}
    lines: list[bytes] = known[name].encode().splitlines(keepends=True)
    at = chance.randrange(len(lines))
    line = spoiled(chance, lines[at].decode()) + b"\n"
    return found | {name: b"".join((*lines[:at], *([line] * chance.choice((0, 1, 1, 1, 2))), *lines[at + 1 :]))}


def manifest_case(chance: Random) -> Files:
    known = run_files()
    kind = chance.random()
    marker = b"step-3\n" if kind < 0.9 else chance.choice((b"../step-3", b"step-" + b"9" * 30, b"\xff", b"", b"a\0b"))
    measured = known["profile.json"].encode()
    text = known["manifest.json"].replace("0" * 64, hashlib.sha256(measured).hexdigest())
    found = {
        "checkpoint/latest": marker,
        "checkpoint/step-3/manifest.json": spoiled(chance, text),
        "profile.json": measured,
    }
    if chance.random() < 0.2:
        found["checkpoint/step-3/a-0-0.safetensors"] = chance.randbytes(40)
    return found


def run_resumed(folder: Path) -> None:
    previous = Path.cwd()
    os.chdir(folder)  # where the profile lies by its relative path
    try:
        resumed_run(folder, 9, folder, functions=())
    finally:
        os.chdir(previous)


@cache
def _order() -> str:
    result = simulate(replace(plan(), schedule="1f1b"), ProfileCosts(profile(), plan()), steps=1)
    return format_orders([[result.orders[one.devices[0]] for one in stage.replicas] for stage in plan().stages])


def order_case(chance: Random) -> Files:
    text = _order()
    kind = chance.random()
    if kind < 0.3:
        return {"order.txt": corrupted(chance, text.encode())}
    words = text.split(" ")
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(words))
        odd = (
            "0F[0:2]",
            "9W[0:4]",
            "0B[4:8]",
            "stage",
            "0",
            "9" * 5000,
            "1F[3:3]",
            "0F[0:" + "9" * 5000 + "]",
            "",
            "\n",
        )
        words[at] = chance.choice((*odd, *words))
    return {"order.txt": " ".join(words).encode()}


# Files of others


def reference_case(chance: Random) -> Files:
    runs = (
        case("made-up/a", [([0, 1], ["fast"]), ([2, 3], ["slow"])]),
        case("made-up/b", [([0, 3], ["fast", "slow"])]),
    )
    known = {name: json.dumps(content) for name, content in files(*runs).items()}
    name = chance.choice(list(known))
    return {other: text.encode() for other, text in known.items()} | {name: spoiled(chance, known[name])}


_CONFIGURATIONS = (
    {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "num_hidden_layers": 2,
     "hidden_size": 64, "max_position_embeddings": 64, "rope_scaling": {"factor": 2.0}, "limits": [0.0, 1.0]},
    {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 32, "num_channels": 3,
     "num_labels": 10, "id2label": {"0": "a"}},
)  # fmt: skip


def configuration_case(chance: Random) -> Files:
    return {"config.json": spoiled(chance, json.dumps(chance.choice(_CONFIGURATIONS)))}


def tokenizer_case(chance: Random) -> Files:
    known = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "[MASK]"}]}
    other = {"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": []}
    return {"tokenizer.json": spoiled(chance, json.dumps(chance.choice((known, other))))}


def lines_case(chance: Random) -> Files:
    known = chance.choice(({"text": "some words", "id": 3}, {"input_ids": [1, 2, 3]}))
    lines = [json.dumps(known).encode()] * 4
    lines[chance.randrange(4)] = spoiled(chance, json.dumps(known))
    return {"data.jsonl": b"\n".join(lines)}


# What other parts of the program keep


@cache
def _master(folder: Path) -> MasterConfig:
    return parse_outer(OUTER, source="outer.yaml", folder=folder).for_master


def master_case(chance: Random) -> Files:
    layers = [Layer(name=f"{k}", parameters=(ParameterSpec(name=f"{k}.w", shape=(2, 3)),)) for k in range(6)]
    layout = divide(tuple(layers), ["s0", "s1"], fragments=2)
    known = {"layout.json": layout, "state.json": _master(Path()).first_state()}
    texts = {name: render_json(to_json(value)) for name, value in known.items()}
    name = chance.choice(list(texts))
    return {other: text.encode() for other, text in texts.items()} | {name: spoiled(chance, texts[name])}


def run_master(folder: Path) -> None:
    kept = MasterFiles(folder)
    try:
        kept.check(_master(folder))
    finally:
        kept.close()


@cache
def _credentials() -> str:
    with TemporaryDirectory() as folder:
        Credentials.kept_in(Path(folder) / "credentials.json")
        return (Path(folder) / "credentials.json").read_text()


def credentials_case(chance: Random) -> Files:
    return {"credentials.json": spoiled(chance, _credentials())}


def testbed_case(chance: Random) -> Files:
    mark = {"pid": 1, "started": 2}
    known = {
        "directory": "/tmp/x", "testbed_id": "ab12", "cluster": "laptop", "boot_id": "x", "router": mark,
        "keeper": mark, "owner": None, "has_user_namespace": True, "site_of": {"a": "lab"},
        "address_of": {"a": "10.0.0.1"}, "namespace_fd_of": {"a": 3}, "networks": [1, 2],
    }  # fmt: skip
    return {"spantrain/ab12.json": spoiled(chance, json.dumps(known))}


def run_testbeds(folder: Path) -> None:
    (folder / "spantrain").chmod(0o700)
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    try:
        for state in read_states():
            assert not state.in_use
    finally:
        os.environ.pop("XDG_RUNTIME_DIR")
        if before is not None:
            os.environ["XDG_RUNTIME_DIR"] = before


TARGETS: tuple[Target, ...] = (
    file_target("cluster-file", lambda chance: {"c.yaml": spoiled_yaml(chance, CLUSTER)}, run_cluster),
    file_target("prices-file", lambda chance: {"p.yaml": spoiled_yaml(chance, PRICES)}, run_prices),
    file_target("changes-file", changes_case, run_changes),
    file_target("network-trace-name", trace_name, run_trace_name),
    file_target("outer-file", lambda chance: {"outer.yaml": spoiled_yaml(chance, OUTER)}, run_outer),
    file_target("plan-simulated", plan_case, run_simulated),
    file_target("plan-shown", plan_case, run_shown),
    file_target("plan-explained", plan_case, run_explained),
    file_target("plan-trained", plan_case, run_asked_for),
    file_target("profile-planned", profile_case, run_planned),
    file_target("run-folder", run_folder_case, validate_run),
    file_target("checkpoint", manifest_case, run_resumed),
    file_target("order-file", order_case, lambda folder: check_order_file(folder / "order.txt")),
    file_target("reference-folder", reference_case, validate_reference),
    file_target("hf-configuration", configuration_case, lambda folder: resolve_model(f"hf:{folder}", data_given=True)),
    file_target("tokenizer-file", tokenizer_case, lambda folder: vocabulary_size(folder / "tokenizer.json")),
    file_target(
        "data-lines", lines_case, lambda folder: document_parts(f"jsonl:{folder / 'data.jsonl'}", ByteEncoder())
    ),
    file_target("master-state", master_case, run_master),
    file_target("credentials", credentials_case, lambda folder: Credentials.kept_in(folder / "credentials.json")),
    file_target("testbed-state", testbed_case, run_testbeds),
)
