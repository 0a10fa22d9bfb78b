"""Plans that were edited by hand: whatever is to be done with one, one reader refuses it, in one message."""

import json

import pytest

from spantrain.app.planning.plan_files import write_plans
from spantrain.app.profiling.describe import described_profile
from spantrain.config.cluster_file import load_preset
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.request import JobSpec


def stage_of(content: dict, index: int = 0) -> dict:
    return content["stages"][index]


def replica_of(content: dict, stage: int = 0) -> dict:
    return stage_of(content, stage)["replicas"][0]


EDITS = {
    "unknown device": (lambda content: replica_of(content).update(devices=["lab-9"]), ("lab-9", "it has", "lab-0")),
    "device in two stages": (
        lambda content: replica_of(content, 1).update(devices=replica_of(content)["devices"], sample_share=2.0),
        ("stages 0 and 1 share", "their replicas must be the same"),
    ),
    "units in two stages": (
        lambda content: stage_of(content, 1).update(first_unit=stage_of(content, 1)["first_unit"] - 1),
        ("stage 1", "first_unit", "must stand in one stage"),
    ),
    "more units than there are": (
        lambda content: stage_of(content, -1).update(end_unit=99),
        ("unit 99 of gpt2-tiny", "end_unit", "14 units", "plan again"),
    ),
    "share of nothing": (
        lambda content: replica_of(content).update(sample_share=-1),
        ("stages[0].replicas[0]", "sample_share must be positive", "-1"),
    ),
    "span left out": (
        lambda content: stage_of(content)["micro_batches"].pop(),
        ("stage 0", "the global batch 64", "must stand in one"),
    ),
    "span from the middle left out": (
        lambda content: stage_of(content)["micro_batches"].pop(0),
        ("stage 0", "leave out or repeat samples at 0"),
    ),
    "limit under a micro-batch": (
        lambda content: replica_of(content).update(in_flight_limit=1),
        ("stage 0, replica 0", "in_flight_limit 1"),
    ),
    "unknown schedule": (lambda content: content.update(schedule="1f1"), ("schedule", "'1f1'", "1f1b")),
    "no replicas": (lambda content: stage_of(content).pop("replicas"), ("stages[0].replicas", "is missing")),
    "no stages": (lambda content: content.update(stages=[]), ("at least one stage",)),
    "last stage left out": (lambda content: without_last_stage(content), ("of gpt2-tiny", "14 units", "plan again")),
    "another width": (
        lambda content: content["model"]["config"].update(n_embd=128),
        ("another gpt2-tiny than the profile", "config.n_embd 128 (profile: 64)"),
    ),
    "shorter samples": (
        lambda content: content["model"].update(sequence_length=32),
        ("another gpt2-tiny than the profile", "sequence_length 32 (profile: 64)"),
    ),
    "a device of another kind": (
        lambda content: device_of(content).update(kind="t4"),
        ("cluster.devices", "'t4' is not among"),
    ),
    "a device at another place": (
        lambda content: swapped_hosts(content),
        ("in the plan", "in the profile", "plan again"),
    ),
    "micro-batches in another order": (
        lambda content: content["stages"][0]["micro_batches"].reverse(),
        ("stage 0: micro-batches must stand in the order of their samples",),
    ),
    "a device outside": (
        lambda content: device_of(content).update(name="../../escaped"),
        ("'../../escaped' is no name",),
    ),
}


def without_last_stage(content: dict) -> None:
    content["stages"].pop()
    content["stages"][-1]["wire_format"] = "native"
    content["hints"] = None


def device_of(content: dict) -> dict:
    name = replica_of(content)["devices"][0]
    return next(device for device in content["cluster"]["devices"] if device["name"] == name)


def swapped_hosts(content: dict) -> None:
    """The two hosts of a site change their devices."""
    hosts = [host for host in content["cluster"]["hosts"] if host["site"] == "lab"]
    hosts[0]["devices"], hosts[1]["devices"] = hosts[1]["devices"], hosts[0]["devices"]
    for host in hosts:
        for device in content["cluster"]["devices"]:
            if device["name"] in host["devices"]:
                device["host"] = host["name"]


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> dict:
    """A plan of several stages, beside its profile."""
    folder = tmp_path_factory.mktemp("planned")
    profile = described_profile(load_preset("laptop"), resolve_model("gpt2-tiny"))
    options = PlanOptions(strategies=("1f1b",))
    write_plans(make_plan(profile, JobSpec(global_batch=64), options), profile, None, folder / "plan.json")
    return {"folder": folder, "text": (folder / "plan.json").read_text()}


@pytest.mark.parametrize("command", ["explain", "simulate", "train", "validate"])
@pytest.mark.parametrize("name", EDITS)
def test_plans_edited_by_hand(refused, planned, command, name):
    """Whatever is to be done with a plan, one reader checks it."""
    change, says = EDITS[name]
    content = json.loads(planned["text"])
    change(content)
    path = planned["folder"] / ("run/plan.json" if command == "validate" else "edited.json")
    path.parent.mkdir(exist_ok=True)
    if command == "validate":
        content["profile"]["path"] = f"../{content['profile']['path']}"
    path.write_text(json.dumps(content))
    more = ("--out", "run", "--no-network") if command == "train" else ()
    refused(command, path.parent if command == "validate" else path, *more, says=(path.name, *says))
