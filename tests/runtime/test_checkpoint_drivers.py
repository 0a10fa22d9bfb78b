"""Devices that have what they need begin to train while others still exchange: nothing is lost, the loss is right."""

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from random import Random

import pytest
import torch

from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.span import Span
from spantrain.errors import Interrupted
from spantrain.models.build import build_units
from spantrain.models.execution.stage import StageExecutor
from spantrain.runtime.channels import DriverChannel
from spantrain.runtime.checkpoint.device_files import FilesToBeginWith
from spantrain.runtime.checkpoint.holding import holding_of
from spantrain.runtime.checkpoint.manifest import Manifest, latest_checkpoint
from spantrain.runtime.checkpoint.saver import restore
from spantrain.runtime.gradients.members import MemberGroup
from spantrain.runtime.gradients.optimizer import build_optimizer
from spantrain.runtime.recorder import StepRecorder
from spantrain.runtime.redistribution.exchange import group_of
from spantrain.runtime.step.driver import StepDriver
from spantrain.runtime.step.following import Followers
from spantrain.runtime.step.own_stage import StageWork
from spantrain.runtime.step.work import DeviceClock, ReplicaWork, SampledFeed
from spantrain.schedule.registry import make_policy, replica_tasks
from testing.backend import compute_device
from testing.memory_mailbox import MemoryMailbox, MemoryNetwork
from testing.models.graphs import graph_of
from testing.patience import PATIENCE_S
from testing.plans import stage_and_replica
from testing.runtime.runs import OneProcess, context_of, devices_of, save_all

pytestmark = pytest.mark.checkpoint

BATCH, DONE = 6, 2
THIRDS = [Span(0, 2), Span(2, 4), Span(4, 6)]
JOB = TrainJob(steps=4, seed=5, learning_rate=0.02, warmup_steps=5)


@pytest.mark.parametrize("seed", range(4))
def test_the_first_step_after_an_exchange(seed, make_plan, spec_of, tmp_path):
    spec, random = spec_of("gpt2"), Random(seed)
    model = OneProcess(spec, JOB, BATCH)
    model.train(0, DONE)
    before = make_plan(spec, [0, 2, 5], [[1], [1]], [THIRDS] * 2, "gpipe")
    devices = devices_of(before, graph_of(spec), JOB, random)
    for device in devices:
        device.fill(model.tensors())
    manifest = save_all(tmp_path / "run", before, JOB, devices, DONE)

    after = make_plan(spec, [0, 1, 3, 5], [[1], [2, 1], [1]], [THIRDS] * 3, random.choice(["1f1b", "critical-path"]))
    disks = {name: tmp_path / name for name in after.devices}
    for disk in disks.values():
        disk.mkdir()
    for name in manifest.files:
        shutil.copy(latest_checkpoint(tmp_path / "run") / name, random.choice(list(disks.values())) / name)
    (wanted,) = model.train(DONE, 1)
    assert loss_after(after, manifest, disks, model) == pytest.approx(wanted, rel=1e-5)


def loss_after(plan: Plan, manifest: Manifest, disks: dict[str, Path], model: OneProcess) -> float:
    """Have all devices begin with the checkpoint and run one step, with nothing to wait for in between."""
    network = MemoryNetwork()
    boxes = {name: network.mailbox(name) for name in plan.devices}
    for box in boxes.values():
        box.set_peers(plan.generation, [other.address for other in boxes.values()])

    failed: list[Exception] = []

    def check_abort() -> None:
        if failed:
            raise Interrupted(str(failed[0]))

    def begin_and_run(name: str) -> float:
        torch.set_num_threads(1)
        executor = executor_of(plan, name)
        driver = driver_of(plan, name, executor, boxes[name], model, check_abort)
        parameters = executor.named_parameters()
        holding = holding_of(plan, name, graph_of(plan.model), parameters)
        post = DriverChannel(driver, generation=plan.generation, step=DONE)
        optimizer = build_optimizer(JOB, parameters.values())
        group = group_of(plan.cluster, name, plan.devices)
        restore(FilesToBeginWith(disks[name], manifest.files), holding, optimizer, group, post)
        stage, replica = stage_and_replica(plan, name)
        return driver.run_step(DONE, make_policy(plan.schedule, replica_tasks(plan)[stage][replica])) or 0.0

    def run_device(name: str) -> float:
        """Have the others end where one fails, as a coordinator would."""
        try:
            return begin_and_run(name)
        except Exception as error:
            failed.append(error)
            raise

    with ThreadPoolExecutor(len(boxes)) as pool:
        losses = [pool.submit(run_device, name) for name in plan.devices]
        wait(losses, PATIENCE_S)
        if failed:
            raise failed[0]
        total = sum(future.result() for future in losses)
    for box in boxes.values():
        box.close()
    return total / plan.global_batch


def executor_of(plan: Plan, name: str) -> StageExecutor:
    stage, _ = stage_and_replica(plan, name)
    return StageExecutor(
        build_units(plan.model, plan.stages[stage].units, seed=99),
        is_last=stage == len(plan.stages) - 1,
        global_batch=plan.global_batch,
    )


def driver_of(
    plan: Plan,
    name: str,
    executor: StageExecutor,
    mailbox: MemoryMailbox,
    model: OneProcess,
    check_abort: Callable[[], None],
) -> StepDriver:
    stage, _ = stage_and_replica(plan, name)
    device = compute_device()
    feed = SampledFeed(model.data, global_batch=BATCH, seed=JOB.seed)
    return StepDriver(
        context_of(name, mailbox, feed, StepRecorder(name, steps=1), check_abort=check_abort),
        plan,
        stages={
            stage: StageWork(
                work=ReplicaWork(
                    executors=(executor,), feed=feed, is_first=stage == 0, is_last=stage == len(plan.stages) - 1
                ),
                clock=DeviceClock(device=device, seconds=lambda _op, _samples: None),
            )
        },
        followers=Followers(MemberGroup(), device.torch_device),
    )
