"""Saved under one plan, loaded under another: the run goes on as if nothing had happened."""

import shutil
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
import torch

from spantrain.core.checkpoint import SampleLedger
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.span import Span
from spantrain.errors import ConfigError
from spantrain.models.sampler import Sampler
from spantrain.runtime.checkpoint.manifest import latest_checkpoint, read_manifest
from testing.models.graphs import graph_of
from testing.runtime.parts import taken
from testing.runtime.runs import OneProcess, PlanDevice, devices_of, in_groups, load_all, save_all

pytestmark = pytest.mark.checkpoint

BATCH, DONE, MORE = 4, 3, 10
JOB = TrainJob(steps=DONE + MORE, seed=5, learning_rate=0.02, warmup_steps=5, max_grad_norm=0.5)
FAMILIES = ("gpt2", "bert", "resnet")
PAIRS = 30


@pytest.fixture(scope="module")
def unbroken(spec_of):
    """By family: graph, tensors after the first steps, losses of the next ten; trained once."""
    known = {}
    torch.set_num_threads(1)  # sums of several threads have other bits
    for family in FAMILIES:
        job = replace(JOB, optimizer="sgd" if family == "resnet" else "adamw")
        model = OneProcess(spec_of(family), job, BATCH)
        model.train(0, DONE)
        tensors = model.tensors()
        known[family] = (job, graph_of(model.spec), tensors, model.train(DONE, MORE))
    return known


def random_plan(make_plan, spec, units: int, random: Random) -> Plan:
    """Random cuts, replicas and tensor-parallel groups."""
    inner = random.sample(range(1, units), random.randint(0, min(3, units - 1)))
    edges = sorted({0, units, *inner})
    shares = [[1] * random.randint(1, 3) for _ in pairwise(edges)]
    return in_groups(make_plan(spec, edges, shares, [[Span(0, BATCH)]] * len(shares), "gpipe"), random)


@pytest.mark.parametrize("pair", range(PAIRS))
def test_another_plan_goes_on_with_the_same_losses(pair, unbroken, make_plan, spec_of, tmp_path):
    """Each device finds on its own disk only what lies on its machine; the rest comes from the others."""
    random = Random(pair)
    family = FAMILIES[pair % len(FAMILIES)]
    job, graph, tensors, losses = unbroken[family]
    before = random_plan(make_plan, spec_of(family), len(graph.units), random)
    after = random_plan(make_plan, spec_of(family), len(graph.units), random)

    devices = devices_of(before, graph, job, random)
    for device in devices:
        device.fill(tensors)
    manifest = save_all(tmp_path / "run", before, job, devices, DONE)
    assert read_manifest(latest_checkpoint(tmp_path / "run")) == manifest

    machines = scattered(tmp_path, manifest, after, random)
    again = devices_of(after, graph, job, random)
    load_all(lambda name: machines[name], manifest.content, after, again)

    model = OneProcess(spec_of(family), replace(job, seed=77), BATCH)
    model.job = job
    empty = {name: {key: torch.full_like(v, 9.0) for key, v in values.items()} for name, values in tensors.items()}
    for device in again:
        device.put_into(empty)
        check_copies(device, tensors)
    model.take_over(empty)
    assert model.train(DONE, MORE) == losses, "the same bits"


def scattered(tmp_path, manifest, plan: Plan, random: Random):
    """A folder for each device of the plan; each file lies in one or two of them, or all share one folder."""
    folder = latest_checkpoint(tmp_path / "run")
    if random.random() < 0.3:
        return dict.fromkeys(plan.devices, folder)
    machines = {name: tmp_path / "machines" / name for name in plan.devices}
    for machine in machines.values():
        machine.mkdir(parents=True)
    for name in manifest.files:
        for device in random.sample(plan.devices, min(len(plan.devices), random.randint(1, 2))):
            shutil.copy(folder / name, machines[device] / name)
    return machines


def check_copies(device: PlanDevice, tensors) -> None:
    """Every copy is right, also those that others overwrite when all are put together."""
    for name, parameter in device.holding.parameters.items():
        assert torch.equal(parameter, taken(tensors[name][""], device.holding.parts[name])), name


def test_every_part_is_saved_by_one_device(unbroken, make_plan, spec_of, tmp_path):
    """Replicas and copies of tied parameters do not save what another has saved."""
    job, graph, tensors, _ = unbroken["gpt2"]
    plan = make_plan(spec_of("gpt2"), [0, 2, 5], [[1, 1], [1, 1, 1]], [[Span(0, BATCH)]] * 2, "gpipe")
    devices = devices_of(plan, graph, job, Random(0))
    for device in devices:
        device.fill(tensors)
    manifest = save_all(tmp_path, plan, job, devices, DONE)
    stored = [name for file in manifest.files.values() for name in file.tensors if not name.startswith("random/")]
    assert sorted(stored) == sorted(set(stored))
    assert {name.split("/", 1)[1] for name in stored if name.startswith("parameter/")} == set(tensors)
    assert "parameter/lm_head.weight" not in stored, "it is the token embedding, which the first stage has"
    assert len(manifest.files) == len(plan.devices)


def test_a_checkpoint_of_another_model_is_refused(unbroken, make_plan, spec_of, tmp_path):
    """What is missing, of another shape or of another type is named."""
    job, graph, tensors, _ = unbroken["gpt2"]
    spec = spec_of("gpt2")
    plan = make_plan(spec, [0, 5], [[1]], [[Span(0, BATCH)]], "gpipe")
    devices = devices_of(plan, graph, job, Random(0))
    devices[0].fill(tensors)
    manifest = save_all(tmp_path, plan, job, devices, DONE)
    folder = latest_checkpoint(tmp_path)

    wider = replace(spec, config={**spec.config, "n_embd": 32})
    others = devices_of(replace(plan, model=wider), graph_of(wider), job, Random(0))
    with pytest.raises(ConfigError, match=r"another model: transformer.wte.weight has shape \[256, 16\] there, \[256"):
        load_all(lambda _: folder, manifest.content, plan, others)
    deeper = replace(spec, config={**spec.config, "n_layer": 4})
    plan_of_deeper = replace(make_plan(deeper, [0, 6], [[1]], [[Span(0, BATCH)]], "gpipe"))
    others = devices_of(plan_of_deeper, graph_of(deeper), job, Random(0))
    with pytest.raises(ConfigError, match=r"it lacks transformer.h.3"):
        load_all(lambda _: folder, manifest.content, plan_of_deeper, others)
    halves = devices_of(plan, graph, job, Random(0))
    for parameter in halves[0].holding.parameters.values():
        parameter.data = parameter.data.half()
    with pytest.raises(ConfigError, match="has type float32 there, float16 here"):
        load_all(lambda _: folder, manifest.content, plan, halves)


def test_what_is_not_trained_is_rounded_as_it_comes(unbroken, make_plan, spec_of, tmp_path):
    job, graph, tensors, _ = unbroken["gpt2"]
    plan = make_plan(spec_of("gpt2"), [0, 5], [[1]], [[Span(0, BATCH)]], "gpipe")
    devices = devices_of(plan, graph, job, Random(0))
    devices[0].fill(tensors)
    manifest = save_all(tmp_path, plan, job, devices, DONE)
    folder, halves = latest_checkpoint(tmp_path), devices_of(plan, graph, job, Random(0))
    parameters = halves[0].holding.parameters
    for parameter in parameters.values():
        parameter.data = parameter.data.bfloat16()
    with pytest.raises(ConfigError, match="has type float32 there, bfloat16 here"):
        load_all(lambda _: folder, manifest.content, plan, halves)
    for parameter in parameters.values():
        parameter.requires_grad_(False)
    load_all(lambda _: folder, manifest.content, plan, halves)
    assert all(torch.equal(parameter, tensors[name][""].bfloat16()) for name, parameter in parameters.items())


def test_another_global_batch_goes_on_behind_the_samples_that_were_consumed(spec_of):
    """The ledger counts samples: no sample is read twice in an epoch, and none is left out."""
    model = OneProcess(spec_of("resnet"), JOB, BATCH)
    size = len(model.data)
    ledger = SampleLedger().extended(0, 4).extended(7, 6).extended(9, 3)
    assert [ledger.samples_before(step) for step in (0, 7, 8, 9, 11)] == [0, 28, 34, 40, 46]
    read: list[int] = []
    step = 0
    for first, end, batch in ((0, 7, 4), (7, 9, 6), (9, 9 + size, 3)):
        sampler = Sampler(
            dataset_size=size, global_batch=batch, seed=1, first_step=first, samples_before=ledger.samples_before(first)
        )
        for step in range(first, end):
            read += sampler.indices(step, Span(0, batch))
    assert sorted(read[:size]) == list(range(size))
    assert step > 9
