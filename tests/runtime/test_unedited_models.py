"""Models that nobody edited train over four devices in three stages as in one process does; workers' own functions."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch

from spantrain.app.reporter import SilentReporter
from spantrain.app.session import SessionOptions, open_session
from spantrain.app.training.requests import TrainRequest
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.span import Span
from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError
from spantrain.models.build import build_units, unit_names
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.data.choice import user_functions, with_own_functions
from spantrain.models.data.dataset import open_dataset
from spantrain.models.execution.stage import StageExecutor
from spantrain.models.randomness.draws import seeded
from spantrain.models.tracing.batch import OwnLoss, picked
from spantrain.models.tracing.source import load_model
from spantrain.models.units import LABELS
from spantrain.runtime.gradients.members import MemberGroup
from spantrain.runtime.recorder import StepRecorder
from spantrain.runtime.step.driver import StepDriver
from spantrain.runtime.step.following import Followers
from spantrain.runtime.step.own_stage import StageWork
from spantrain.runtime.step.work import DeviceClock, ReplicaWork, SampledFeed
from spantrain.schedule.registry import make_policy, replica_tasks
from testing.backend import compute_device
from testing.memory_mailbox import MemoryNetwork
from testing.models import own_models
from testing.models.library_models import CONFIGURATIONS, library_spec
from testing.patience import PATIENCE_S
from testing.plans import stage_and_replica
from testing.runtime.runs import context_of

pytestmark = pytest.mark.models

SEED, STEPS, BATCH, RATE = 3, 5, 6, 0.05
SPANS = [[Span(0, 2), Span(2, 4), Span(4, 6)], [Span(0, 3), Span(3, 6)], [Span(0, 2), Span(2, 6)]]
SHARES = [[1], [2, 1], [1]]
MODELS = (*CONFIGURATIONS, *(f"own:{name}" for name in own_models.GOOD))


@dataclass(frozen=True)
class Place:
    """One device of the run."""

    name: str
    driver: StepDriver
    executor: StageExecutor
    stage: int
    replica: int


def spec_of(name: str, folder) -> ModelSpec:
    if name.startswith("own:"):
        return resolve_model(f"{own_models.__file__}:{name.removeprefix('own:')}")
    return library_spec(name, folder)


def feed_of(spec: ModelSpec) -> SampledFeed:
    return SampledFeed(open_dataset(spec), global_batch=BATCH, seed=SEED)


def place_of(plan: Plan, name: str, network: dict, feed: SampledFeed) -> Place:
    stage, replica = stage_and_replica(plan, name)
    is_first, is_last = stage == 0, stage == len(plan.stages) - 1
    executor = StageExecutor(
        build_units(plan.model, plan.stages[stage].units, seed=SEED),
        is_last=is_last,
        global_batch=BATCH,
        torch_device=compute_device().torch_device,
        seed=SEED,
    )
    network[name].set_peers(plan.generation, [box.address for box in network.values()])
    device = compute_device()
    driver = StepDriver(
        context_of(name, network[name], feed, StepRecorder(name, steps=STEPS)),
        plan,
        stages={
            stage: StageWork(
                work=ReplicaWork(executors=(executor,), feed=feed, is_first=is_first, is_last=is_last),
                clock=DeviceClock(device=device, seconds=lambda _op, _samples: None),
            )
        },
        followers=Followers(MemberGroup(), device.torch_device),
    )
    return Place(name=name, driver=driver, executor=executor, stage=stage, replica=replica)


def split_losses(plan: Plan) -> list[float]:
    """Mean losses of steps over all devices, in threads, with plain gradient descent between them."""
    network = MemoryNetwork()
    boxes = {name: network.mailbox(name) for name in plan.devices}
    places = [place_of(plan, name, boxes, feed_of(plan.model)) for name in plan.devices]
    tasks = replica_tasks(plan)
    whole = load_model(plan.model, seed=SEED).module
    identity = {name: id(parameter) for name, parameter in whole.named_parameters(remove_duplicate=False)}

    def run(place: Place, step: int) -> float:
        torch.set_num_threads(1)
        return place.driver.run_step(step, make_policy(plan.schedule, tasks[place.stage][place.replica])) or 0.0

    losses = []
    with ThreadPoolExecutor(len(places)) as pool:
        for step in range(STEPS):
            futures = [pool.submit(run, place, step) for place in places]
            losses.append(sum(future.result(PATIENCE_S) for future in futures) / BATCH)
            descend(places, identity)
    for box in boxes.values():
        box.close()
    return losses


def descend(places: list[Place], identity: dict[str, int]) -> None:
    """Sum the gradients of all copies of a parameter, and step all of them alike."""
    copies: dict[int, list[torch.nn.Parameter]] = {}
    for place in places:
        for name, parameter in place.executor.named_parameters().items():
            copies.setdefault(identity[name], []).append(parameter)
    with torch.no_grad():
        for parameters in copies.values():
            total = sum(p.grad for p in parameters if p.grad is not None)
            for parameter in parameters:
                parameter -= RATE * total
                parameter.grad = None


def unsplit_losses(spec: ModelSpec) -> list[float]:
    loaded, feed = load_model(spec, seed=SEED), feed_of(spec)
    losses = []
    for step in range(STEPS):
        span = Span(0, BATCH)
        rows = feed.rows(step, span, (*range(len(loaded.batch.inputs)), LABELS))
        labels = rows[LABELS]
        pairs = list(zip(rows.values(), loaded.batch.names, strict=False))
        named = {name: tensor for tensor, name in pairs if name is not None}
        if isinstance(loaded.loss, OwnLoss):
            named["labels"] = labels
        loaded.set_mode(trains=True)
        with seeded(loaded.module, seed=SEED, step=step):
            result = loaded.module(*(tensor for tensor, name in pairs if name is None), **named)
        loss = loaded.loss(picked(loaded.loss, result, spec.name), labels, BATCH) / BATCH
        loss.backward()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for parameter in loaded.module.parameters():
                if parameter.grad is not None:
                    parameter -= RATE * parameter.grad
                    parameter.grad = None
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_five_steps_across_four_devices_in_three_stages_lose_what_one_process_does(name, make_plan, tmp_path):
    spec = spec_of(name, tmp_path)
    count = len(unit_names(spec))
    plan = make_plan(spec, [0, 1, max(2, count - 2), count], SHARES, SPANS, "critical-path")
    wanted = unsplit_losses(spec)
    assert split_losses(plan) == pytest.approx(wanted, rel=1e-4)
    assert len(set(wanted)) == STEPS


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_workers_lose_what_one_process_does(make_plan, law_profile, tmp_path):
    """One model computes its own loss, and all stages share a layer of it; the other is a library's."""
    own, library = spec_of("own:own_loss", tmp_path), spec_of("llama", tmp_path)
    job = TrainJob(
        steps=STEPS, seed=SEED, optimizer="sgd", momentum=0.0, learning_rate=RATE, weight_decay=0.0, warmup_steps=0,
        max_grad_norm=None,
    )  # fmt: skip
    plans = [
        make_plan(spec, [0, 1, 3, len(unit_names(spec))], SHARES, SPANS, "critical-path") for spec in (own, library)
    ]
    options = SessionOptions(network=False, functions=user_functions(own))
    with open_session(plans[0].cluster, plans[0].devices, options, tmp_path / "logs", SilentReporter()) as session:
        for generation, plan in enumerate(plans, start=1):
            profile = law_profile(plan.cluster, plan.model, plan.dtype)
            request = TrainRequest(
                plan=replace(plan, generation=generation),
                profile=profile,
                profile_path="",
                job=job,
                out=tmp_path / str(generation),
                checkpoints=False,
            )
            outcome = train(session, request, StopRequest(), SilentReporter())
            assert outcome.losses == pytest.approx(unsplit_losses(plan.model), rel=1e-4)


def test_a_worker_calls_its_own_function_or_none():
    spec = resolve_model(f"{own_models.__file__}:chain")
    theirs = replace(spec, source="/elsewhere/own_models.py:chain")
    assert with_own_functions(theirs, [spec.source]) == spec
    with pytest.raises(ConfigError, match=r"not started with; start it with --function own_models\.py:chain"):
        with_own_functions(spec, [])
    with pytest.raises(ConfigError, match="not started with"):
        with_own_functions(spec, [f"{own_models.__file__}:mixture"])


def test_a_library_configuration_needs_no_function(tmp_path):
    spec = library_spec("gpt2", tmp_path)
    assert with_own_functions(spec, []) == spec
