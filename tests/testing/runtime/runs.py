"""Runs without a network: a model in one process, and the devices of a plan that hold their parts of it."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from spantrain.adaptation.registry import LocalAdapters
from spantrain.core.checkpoint import CheckpointContent, SampleLedger
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan, Replica
from spantrain.core.shares import TensorPart
from spantrain.core.span import Span
from spantrain.core.units import ModelSpec, UnitGraph
from spantrain.models.build import build_units
from spantrain.models.data.dataset import open_dataset
from spantrain.models.execution.stage import StageExecutor
from spantrain.models.randomness.draws import DrawnSamples
from spantrain.models.units import loss_of, parameter_names, rows_read
from spantrain.runtime.channels import MailboxChannel
from spantrain.runtime.checkpoint.device_files import FilesToBeginWith
from spantrain.runtime.checkpoint.holding import Holding, first_names, holding_of
from spantrain.runtime.checkpoint.manifest import CheckpointSet, Manifest
from spantrain.runtime.checkpoint.saver import DeviceCheckpoints, restore
from spantrain.runtime.checkpoint.tensor_file import Disk
from spantrain.runtime.control.requests import SavedFile
from spantrain.runtime.gradients.optimizer import build_optimizer, clip_factor, set_rates
from spantrain.runtime.recorder import StepRecorder
from spantrain.runtime.redistribution.exchange import group_of
from spantrain.runtime.step.context import WorkerContext
from spantrain.runtime.step.work import Feed, SampledFeed
from testing.backend import compute_device
from testing.memory_mailbox import MemoryNetwork
from testing.patience import PATIENCE_S
from testing.runtime.parts import dealt, put, taken


class OneProcess:
    """The unsplit model, its optimizer, and as many steps as wanted."""

    def __init__(self, spec: ModelSpec, job: TrainJob, global_batch: int) -> None:
        self.spec = spec
        self.job = job
        self.global_batch = global_batch
        self.units = build_units(spec, seed=job.seed)
        executor = StageExecutor(self.units, is_last=True, global_batch=global_batch)
        self.parameters = executor.named_parameters()
        self.optimizer = build_optimizer(job, self.parameters.values(), self.parameters)
        self.data = open_dataset(spec)

    def train(self, first_step: int, steps: int, samples_before: int | None = None) -> list[float]:
        feed = SampledFeed(
            self.data,
            global_batch=self.global_batch,
            seed=self.job.order_seed,
            first_step=first_step,
            samples_before=samples_before,
        )
        return [self._step(step, feed) for step in range(first_step, first_step + steps)]

    def _backward(self, step: int, feed: SampledFeed) -> float:
        whole = Span(0, self.global_batch)
        samples = DrawnSamples(seed=self.job.seed, step=step, first=0, count=self.global_batch)
        loss = loss_of(self.units, feed.rows(step, whole, rows_read(self.units)), samples) / self.global_batch
        loss.backward()
        return float(loss.detach())

    def _step(self, step: int, feed: SampledFeed) -> float:
        loss = self._backward(step, feed)
        norm = sum(float(p.grad.double().square().sum()) for p in self.parameters.values()) ** 0.5
        for parameter in self.parameters.values():
            parameter.grad.mul_(clip_factor(norm, self.job.max_grad_norm))
        set_rates(self.optimizer, self.job, step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Parameters with their state, by name; copies."""
        return {
            name: {"": p.detach().clone(), **{key: value.clone() for key, value in self.optimizer.state[p].items()}}
            for name, p in self.parameters.items()
        }

    def take_over(self, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        for name, parameter in self.parameters.items():
            values = dict(tensors[name])
            with torch.no_grad():
                parameter.copy_(values.pop(""))
            self.optimizer.state[parameter] = values


def one_process_losses(plan: Plan, job: TrainJob) -> list[float]:
    """The losses of one process that does a plan's job."""
    return OneProcess(plan.model, job, plan.global_batch).train(0, job.steps)


class OldWeights(OneProcess):
    """The same with weights one step old: each step's gradients are of the weights before the last update."""

    def __init__(self, spec: ModelSpec, job: TrainJob, global_batch: int) -> None:
        super().__init__(spec, job, global_batch)
        self._old = self._weights()

    def _weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters.values()]

    @torch.no_grad()
    def _load(self, weights: list[torch.Tensor]) -> None:
        for parameter, weight in zip(self.parameters.values(), weights, strict=True):
            parameter.copy_(weight)

    def _backward(self, step: int, feed: SampledFeed) -> float:
        newest = self._weights()
        self._load(self._old)
        loss = super()._backward(step, feed)
        self._load(newest)
        self._old = newest
        return loss

    def _step(self, step: int, feed: SampledFeed) -> float:
        loss = super()._step(step, feed)
        done = step + 1
        if any(every and done % every == 0 for every in (self.job.checkpoint_every, self.job.evaluate_every)):
            self._old = self._weights()
        return loss


def context_of(name: str, mailbox: Any, feed: Feed, recorder: StepRecorder | None = None, **more: Any) -> WorkerContext:
    """What a driver of steps has around it: a processor, and no more of a run than steps need."""
    none = dict.fromkeys(("graph", "job", "control", "open_groups"))
    rest = {**none, "adapters": LocalAdapters("off", name), "check_abort": lambda: None, **more}
    recorder = recorder or StepRecorder(name)
    return WorkerContext(name=name, device=compute_device(), mailbox=mailbox, feed=feed, recorder=recorder, **rest)


@dataclass
class PlanDevice:
    """One device of a plan, with its part of the model in memory."""

    name: str
    holding: Holding
    optimizer: torch.optim.Optimizer

    def fill(self, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take this device's parts of the unsplit model's tensors."""
        for name, parameter in self.holding.parameters.items():
            part = self.holding.parts[name]
            values = {
                key: taken(value, part) if value.shape == part.full_shape else value.clone()
                for key, value in tensors[name].items()
            }
            with torch.no_grad():
                parameter.copy_(values.pop(""))
            self.optimizer.state[parameter] = values

    def put_into(self, tensors: Mapping[str, dict[str, torch.Tensor]]) -> None:
        """Give the unsplit model's tensors this device's parts."""
        for name, parameter in self.holding.parameters.items():
            part = self.holding.parts[name]
            for key, value in {"": parameter.detach(), **self.optimizer.state[parameter]}.items():
                if tensors[name][key].shape == part.full_shape:
                    put(tensors[name][key], part, value)
                else:
                    tensors[name][key].copy_(value)


def devices_of(plan: Plan, graph: UnitGraph, job: TrainJob, random: Random) -> list[PlanDevice]:
    """The devices of a plan with new weights; each group of a replica divides every tensor in a made-up way."""
    found = []
    first = first_names(plan.model, graph)
    for stage in plan.stages:
        units = build_units(plan.model, stage.units, seed=job.seed + 1)
        whole = StageExecutor(units, is_last=True, global_batch=plan.global_batch).named_parameters()
        names = {name for unit in units for name in parameter_names(unit).values()}
        assert {first.get(name, name) for name in names} == {first.get(name, name) for name in whole}
        shapes = {name: tuple(parameter.shape) for name, parameter in whole.items()}
        for replica in stage.replicas:
            divided = dealt(shapes, len(replica.devices), random)
            found += [
                _device(plan, graph, job, device, parts) for device, parts in zip(replica.devices, divided, strict=True)
            ]
    return found


def _device(plan: Plan, graph: UnitGraph, job: TrainJob, device: str, parts: Mapping[str, TensorPart]) -> PlanDevice:
    local = {name: torch.nn.Parameter(torch.zeros(part.shape)) for name, part in parts.items()}
    holding = holding_of(plan, device, graph, local, parts)
    return PlanDevice(name=device, holding=holding, optimizer=build_optimizer(job, local.values(), local))


def in_groups(plan: Plan, random: Random) -> Plan:
    """The plan with some neighbouring replicas made one tensor-parallel replica."""
    stages = []
    for stage in plan.stages:
        replicas: list[Replica] = []
        for replica in stage.replicas:
            if replicas and random.random() < 0.5:
                before = replicas.pop()
                devices = (*before.devices, *replica.devices)
                replica = replace(before, devices=devices, tp_shares=(1.0,) * len(devices))
            replicas.append(replica)
        stages.append(replace(stage, replicas=tuple(replicas)))
    return replace(plan, stages=tuple(stages))


def save_all(run: Path, plan: Plan, job: TrainJob, devices: Sequence[PlanDevice], step: int, **options) -> Manifest:
    """Have all devices save, and the coordinator complete the checkpoint; return its manifest."""
    manifests: list[Manifest] = []
    ledger = options.pop("ledger", None) or SampleLedger().extended(0, plan.global_batch)
    storage: Disk | None = options.pop("storage", None)
    scalars, best = options.pop("scalars", {}), options.pop("best", None)

    def describe(saved: SavedFile, files) -> Manifest:
        manifests.append(
            Manifest(
                step=saved.step, model=plan.model, plan=plan, job=job, profile="",
                losses=(1.0,) * saved.step, ledger=ledger, scalars=saved.scalars, files=files,
            )
        )  # fmt: skip
        return manifests[-1]

    names = [device.name for device in devices]
    keep = options.pop("keep", 2)
    together = CheckpointSet(run, names, keep=keep, describe=describe, storage=storage, best_step=lambda: best)
    saved: list[SavedFile] = []

    def report(one: SavedFile) -> tuple[int, ...]:
        saved.append(one)
        return ()

    for device in devices:
        with DeviceCheckpoints(str(run), device.name, device.holding, device.optimizer, report, storage) as own:
            own.save(step, scalars)
    for one in saved:
        together.on_saved(one)
    assert not options
    return manifests[-1]


def load_all(
    folder_of: Callable[[str], Path], content: CheckpointContent, plan: Plan, devices: Sequence[PlanDevice]
) -> None:
    """Have all devices of a plan begin with a checkpoint, each with the folder that it sees."""
    network = MemoryNetwork()
    boxes = {device.name: network.mailbox(device.name) for device in devices}

    def load(device: PlanDevice) -> None:
        boxes[device.name].set_peers(1, [box.address for box in boxes.values()])
        post = MailboxChannel(boxes[device.name], generation=1, step=content.step)
        group = group_of(plan.cluster, device.name, tuple(boxes))
        restore(FilesToBeginWith(folder_of(device.name), content.files), device.holding, device.optimizer, group, post)

    with ThreadPoolExecutor(len(devices)) as pool:
        for future in [pool.submit(load, device) for device in devices]:
            future.result(PATIENCE_S)
