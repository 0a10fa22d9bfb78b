"""Parameters of a plan's stages as an outer optimizer has them, whatever divides them, and whoever holds them."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.span import Span
from spantrain.devices.base import CpuDevice
from spantrain.models.build import build_units, unit_names
from spantrain.models.tensor_parallel.division import take
from spantrain.runtime.channels import MailboxChannel
from spantrain.runtime.checkpoint.holding import first_names, holding_of
from spantrain.runtime.step.stage_member import build_member
from spantrain.runtime.worker.outer_part import StageParameters, stage_layers
from testing.memory_mailbox import MemoryNetwork
from testing.models.graphs import graph_of
from testing.models.thread_group import ThreadGroup
from testing.patience import PATIENCE_S
from testing.runtime.groups import divided, random_groups
from testing.runtime.thread_groups import thread_groups

pytestmark = pytest.mark.tensor_parallel

SEED, STEP = 3, 4
HALVES = [Span(0, 1), Span(1, 2)]
RANDOM = {"deadline": None, "suppress_health_check": list(HealthCheck), "phases": [Phase.explicit, Phase.generate]}


class Devices:
    """The devices of a plan, each with its part of the model, and no pipeline between them."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.graph = plan, graph_of(plan.model)
        self.found = stage_layers(plan, self.graph)
        network = MemoryNetwork()
        self._boxes = {name: network.mailbox(name) for name in plan.devices}
        for box in self._boxes.values():
            box.set_peers(plan.generation, [other.address for other in self._boxes.values()])
        self._groups = {name: found for stage in plan.stages for name, found in thread_groups(stage).items()}
        self._units = {
            name: build_units(plan.model, stage.units, seed=SEED) for stage in plan.stages for name in stage.devices
        }
        self._pool = ThreadPoolExecutor(len(plan.devices))
        self.holdings: dict[str, Any] = {}
        self.all = self.at_once(self._made)

    def at_once(self, work: Callable[[str], Any]) -> dict[str, Any]:
        """Have all devices do the same; who fails lets go of those who wait for it."""

        def one(name: str) -> Any:
            finished = False
            try:
                result = work(name)
                finished = True
                return result
            finally:
                for group in (self._groups[name].world, self._groups[name].replica):
                    if not finished and isinstance(group, ThreadGroup):
                        group.leave()

        running = {name: self._pool.submit(one, name) for name in self.plan.devices}
        errors = [error for future in running.values() if (error := future.exception(PATIENCE_S)) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return {name: future.result() for name, future in running.items()}

    def _made(self, name: str) -> StageParameters:
        plan, groups = self.plan, self._groups[name]
        here: Any = SimpleNamespace(name=name, device=CpuDevice(), graph=self.graph, job=TrainJob(steps=1))
        member = build_member(here, plan, self._units[name], groups)
        named = member.named_parameters
        holding = self.holdings[name] = holding_of(plan, name, self.graph, named, member.parts.own)
        post = MailboxChannel(self._boxes[name], generation=plan.generation, step=STEP)
        part: Any = SimpleNamespace(plan=plan, member=member, holding=holding, post=lambda *_, **__: post)
        return StageParameters(self.found, SimpleNamespace(name=name), part, STEP)  # type: ignore[arg-type]

    def copied(self) -> dict[str, dict[str, Tensor]]:
        """What each device that leads a stage gets."""

        def one(name: str) -> dict[str, Tensor]:
            into = self.all[name].memory() if self.all[name].leads else {}
            self.all[name].copy(into)
            return into

        return self.at_once(one)

    def train(self, name: str) -> None:
        """Change what a device holds: the same number everywhere in a parameter, another for each."""
        for parameter, one in self.holdings[name].parameters.items():
            one.data.add_(len(parameter) / 4)

    def assert_holds(self, wanted: dict[str, Tensor]) -> None:
        """All devices hold their parts of these, bit for bit."""
        for device, holding in self.holdings.items():
            for name, one in holding.parameters.items():
                assert torch.equal(one.detach(), take(wanted[name], holding.parts[name])), (device, name)

    def close(self) -> None:
        self._pool.shutdown()
        for box in self._boxes.values():
            box.close()


def merged(copies: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """What the leaders have together, each parameter once."""
    names = [name for copy in copies.values() for name in copy]
    assert len(names) == len(set(names))
    return {name: one for copy in copies.values() for name, one in copy.items()}


def check(plan: Plan, reference) -> None:
    devices = Devices(plan)
    try:
        first = first_names(plan.model, devices.graph)
        _, named = reference(plan.model, SEED)
        whole = {name: one.detach() for name, one in named.items() if first.get(name, name) == name}
        start = devices.copied()
        assert merged(start).keys() == whole.keys()
        assert all(torch.equal(one, whole[name]) for name, one in merged(start).items())
        new = {device: {name: torch.randn_like(one) for name, one in copy.items()} for device, copy in start.items()}
        devices.at_once(lambda name: devices.all[name].move(start[name], new[name]))
        devices.assert_holds(merged(new))
        devices.at_once(devices.train)
        devices.at_once(lambda name: devices.all[name].move(new[name], start[name]))
        moved = merged(devices.copied())
        devices.assert_holds(moved)
        for name, one in moved.items():
            assert torch.allclose(one, whole[name] + len(name) / 4, atol=1e-5), name
    finally:
        devices.close()


@settings(max_examples=12, **RANDOM)
@given(data=st.data())
def test_copies_are_whole_and_versions_reach_all(data, plans, reference):
    """Whatever divides the model; image models are cut through layers."""
    plan = data.draw(plans(("gpt2", "bert", "resnet", "efficientnet")))
    check(divided(plan, data.draw(random_groups(plan))), reference)


def test_tied_parameters_of_groups_on_both_ends(make_plan, spec_of, reference):
    plan = make_plan(spec_of("gpt2"), [0, 2, 5], [[1, 1], [1]], [HALVES, HALVES], "1f1b")
    check(divided(plan, [[[1, 2], [2, 1]], [[1, 1, 1]]]), reference)


def test_a_cut_through_a_layer_between_groups(make_plan, spec_of, reference):
    names = unit_names(spec_of("resnet"))
    cut = next(index for index, name in enumerate(names) if "stages.1.layers.1" in name)
    plan = make_plan(spec_of("resnet"), [0, cut, len(names)], [[1], [1, 1]], [HALVES, HALVES], "1f1b")
    assert any(route.mover not in route.holders for route in stage_layers(plan, graph_of(plan.model)).routes)
    check(divided(plan, [[[1, 1]], [[2, 1], [1]]]), reference)
