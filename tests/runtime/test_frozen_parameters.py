"""Parameters that are not trained: one device's updates, no state, no gradients, no sums; other plans, old weights."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from spantrain.app.profiling.describe import described_profile
from spantrain.config.artefacts import read_profile, write_profile
from spantrain.config.cluster_file import load_preset
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.shares import StateSharding
from spantrain.core.span import Span
from spantrain.core.units import ModelSpec
from spantrain.cost.memory import MemoryCost
from spantrain.cost.span_tables import SpanTables
from spantrain.formats.precision import LOW_WEIGHTS
from spantrain.formats.registry import WireFormat
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.graph import build_graph
from spantrain.models.tensor_parallel.division import take
from spantrain.runtime.gradients.optimizer import learning_rate
from testing.models import frozen_models
from testing.models.graphs import graph_of
from testing.runtime.sessions import Ran, train_in_threads

pytestmark = pytest.mark.models

NAMES = tuple(function.__name__ for function in frozen_models.GOOD)
HALVES = [Span(0, 3), Span(3, 6)]
JOB = TrainJob(
    steps=4, seed=5, learning_rate=0.02, weight_decay=0.3, max_grad_norm=0.5, adam_epsilon=1e-3, adapter="off"
)


def spec_of(name: str) -> ModelSpec:
    return resolve_model(f"{frozen_models.__file__}:{name}")


def plain(name: str, job: TrainJob = JOB) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses, parameters behind the last step, and the number of parameters that the optimizer has state of."""
    model, batch = getattr(frozen_models, name)()
    model.eval()
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=job.learning_rate, weight_decay=job.weight_decay, eps=job.adam_epsilon)
    losses = []
    for step in range(job.steps):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, job.max_grad_norm)
        optimizer.param_groups[0]["lr"] = learning_rate(job, step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: one.detach() for name, one in model.named_parameters()}, len(trained)


def plan_of(make_plan, name: str, shares: list[list[int]], schedule: str = "1f1b") -> Plan:
    units = len(graph_of(spec_of(name)).units)
    cuts = [0, *(units * number // len(shares) for number in range(1, len(shares))), units]
    return make_plan(spec_of(name), cuts, shares, [HALVES] * len(shares), schedule)


def check_same(ran: Ran, name: str, steps: int) -> None:
    losses, wanted, _ = plain(name, replace(JOB, steps=steps))
    torch.testing.assert_close(torch.tensor(ran.losses), torch.tensor(losses), rtol=1e-5, atol=1e-6)
    frozen = {key for key, one in getattr(frozen_models, name)()[0].named_parameters() if not one.requires_grad}
    seen = set()
    for session in ran.sessions.values():
        for key, parameter in session._part.holding.parameters.items():
            seen.add(key)
            if key in frozen:
                assert torch.equal(parameter, wanted[key]), key
            else:
                torch.testing.assert_close(parameter.detach(), wanted[key], rtol=1e-4, atol=2e-6)
    assert seen == set(wanted)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("name", NAMES)
def test_three_stages_with_replicas_train_as_plain_torch(name, schedule, make_plan):
    ran = train_in_threads(plan_of(make_plan, name, [[1], [2, 1], [1]], schedule), JOB)
    check_same(ran, name, JOB.steps)
    for session in ran.sessions.values():
        held = session._part.member.named_parameters.values()
        trained = [one for one in held if one.requires_grad]
        assert {id(one) for one in session._part.optimizer.state} == {id(one) for one in trained}
        assert all(one.grad is None for one in held)


@pytest.mark.parametrize("name", ["upper_blocks", "adapters"])
def test_recomputed_units_train_as_plain_torch(name, make_plan):
    plan = plan_of(make_plan, name, [[1], [1]])
    stages = [replace(stage, recompute=tuple(stage.units)[1:]) for stage in plan.stages]
    check_same(train_in_threads(replace(plan, stages=tuple(stages)), JOB), name, JOB.steps)


@pytest.mark.tensor_parallel
@pytest.mark.parametrize("name", NAMES)
def test_units_divided_between_two_devices_train_as_plain_torch(name, make_plan):
    plan = plan_of(make_plan, name, [[1], [1]])
    together = replace(plan.stages[0].replicas[0], devices=plan.devices, tp_shares=(1.0, 1.0))
    whole = replace(plan.stages[0], end_unit=plan.stages[-1].end_unit, replicas=(together,))
    ran = train_in_threads(plan, JOB, {2: replace(plan, stages=(whole,))})
    losses, wanted, _ = plain(name)
    torch.testing.assert_close(torch.tensor(ran.losses), torch.tensor(losses), rtol=1e-5, atol=1e-6)
    for session in ran.sessions.values():
        for key, parameter in session._part.holding.parameters.items():
            own = take(wanted[key], session._part.holding.parts[key])
            torch.testing.assert_close(parameter.detach(), own, rtol=1e-4, atol=2e-6)


def test_a_base_in_sixteen_bits_trains_as_plain_torch_to_its_rounding(make_plan):
    ran = train_in_threads(plan_of(make_plan, "adapters_on_bfloat16", [[1], [1]]), JOB)
    losses, wanted, _ = plain("adapters_on_bfloat16")
    torch.testing.assert_close(torch.tensor(ran.losses), torch.tensor(losses), rtol=1e-3, atol=1e-3)
    held = {name: one for session in ran.sessions.values() for name, one in session._part.holding.parameters.items()}
    assert {one.dtype for one in held.values()} == {torch.float32, torch.bfloat16}
    for name, parameter in held.items():
        assert torch.equal(parameter, wanted[name]) or parameter.requires_grad, name


def in_sixteen_bits(name: str) -> dict[str, torch.Tensor]:
    """What of a model is not trained, as it is held where weights are computed with in 16 bits."""
    model, _ = getattr(frozen_models, name)()
    norms = {
        f"{path}.{own}"
        for path, one in model.named_modules()
        if isinstance(one, nn.LayerNorm)
        for own in one._parameters
    }
    frozen = {key: one.detach() for key, one in model.named_parameters() if not one.requires_grad}
    return {key: one if key in norms else one.bfloat16() for key, one in frozen.items()}


@pytest.fixture(scope="module")
def alone(make_plan) -> Callable[[str], Ran]:
    """What one device does with a model, in weights of sixteen bits."""

    @cache
    def ran(name: str) -> Ran:
        return train_in_threads(replace(plan_of(make_plan, name, [[1]]), dtype=LOW_WEIGHTS), JOB)

    return ran


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(("adapters_on_bfloat16", way) for way in StateSharding),
        ("adapters", StateSharding.NONE),
        ("adapters", StateSharding.ZERO3),
        ("upper_blocks", StateSharding.ZERO1),
        ("upper_blocks", StateSharding.ZERO2),
        ("upper_blocks", StateSharding.OFFLOAD),
    ],
)
def test_weights_of_sixteen_bits_that_are_not_trained_are_held_in_them_alone(name, way, make_plan, alone):
    """As one device does it, whatever is divided, offloaded or moved to another stage."""
    plan = plan_of(make_plan, name, [[1] if way is StateSharding.OFFLOAD else [2, 1], [1]])
    stages = [replace(stage, state_sharding=way) for stage in plan.stages]
    plan = replace(plan, dtype=LOW_WEIGHTS, stages=tuple(stages))
    moved = replace(plan.stages[0], end_unit=2), replace(plan.stages[1], first_unit=2)
    wanted, held = alone(name), in_sixteen_bits(name)
    for changes in ({}, {2: replace(plan, generation=2, stages=moved)}):
        ran = train_in_threads(plan, JOB, changes)
        assert ran.losses == pytest.approx(wanted.losses, abs=5e-3)
        for session in ran.sessions.values():
            holding = session._part.holding
            for key, parameter in holding.parameters.items():
                if parameter.requires_grad:
                    assert parameter.dtype is torch.float32
                else:
                    assert torch.equal(parameter, take(held[key], holding.parts[key])), key


@pytest.mark.parametrize("name", ["last_block", "biases"])
def test_a_change_of_plan_keeps_what_is_not_trained(name, make_plan):
    first = plan_of(make_plan, name, [[1], [1]])
    moved = replace(first.stages[0], end_unit=2), replace(first.stages[1], first_unit=2)
    ran = train_in_threads(first, JOB, {2: replace(first, stages=moved)})
    check_same(ran, name, JOB.steps)


def test_old_weights_have_one_set_of_what_is_not_trained(make_plan):
    job = replace(JOB, staleness=1, steps=3)
    ran = train_in_threads(plan_of(make_plan, "upper_blocks", [[1], [1]]), job)
    losses, wanted, _ = plain("upper_blocks", job)
    assert ran.losses[0] == pytest.approx(losses[0], rel=1e-5)
    for session in ran.sessions.values():
        member = session._part.member
        second = member.second.named_parameters()
        for name, own in member.named_parameters.items():
            assert (own is second[name]) is not own.requires_grad, name
            if not own.requires_grad:
                assert torch.equal(own, wanted.get(name, wanted["transformer.wte.weight"])), name


def test_no_gradients_go_where_nothing_is_trained(make_plan):
    plan = plan_of(make_plan, "last_block", [[1], [1], [1]])
    graph = graph_of(plan.model)
    assert [unit.goes_back for unit in graph.units] == [False] * 5 + [True] * 2
    assert [unit.backward_bytes(WireFormat.NATIVE) > 0 for unit in graph.units] == [False] * 5 + [True, False]
    ran = train_in_threads(plan, JOB)
    first, second, _ = (ran.results[stage.devices[0]] for stage in plan.stages)
    there, back = first.sent_bytes[plan.stages[1].devices[0]], second.sent_bytes[plan.stages[0].devices[0]]
    assert back < there / 3  # headers alone
    assert first.peak_bytes < second.peak_bytes


@pytest.mark.parametrize("name", NAMES)
def test_the_graph_and_all_costs_count_what_is_trained(name, tmp_path):
    graph = graph_of(spec_of(name))
    model, _ = getattr(frozen_models, name)()
    trained = [one for one in model.parameters() if one.requires_grad]
    assert graph.trained_bytes == sum(one.nbytes for one in trained)
    assert graph.parameter_bytes == sum(one.nbytes for one in model.parameters())
    profile = described_profile(load_preset("laptop"), spec_of(name))
    memory, every = MemoryCost(profile, "adamw"), range(len(graph.units))
    assert memory.state_bytes(every) == graph.parameter_bytes + 3 * graph.trained_bytes
    assert profile.graph.held_trained_bytes(every) == tuple(graph.held_trained_bytes(every))
    tables = SpanTables(profile, optimizer="adamw", splits=True)
    assert tables.state()[0, -1] == memory.state_bytes(every)
    assert tables.trained()[0, -1] == graph.trained_bytes
    write_profile(profile, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile


@pytest.mark.parametrize("name", NAMES)
def test_what_is_held_in_sixteen_bits_is_counted_so(name):
    graph, full = build_graph(spec_of(name), dtype=LOW_WEIGHTS), graph_of(spec_of(name))
    frozen = in_sixteen_bits(name)
    assert graph.trained_bytes == full.trained_bytes
    assert graph.parameter_bytes == full.trained_bytes + sum(one.nbytes for one in frozen.values())
    profile, every = described_profile(load_preset("laptop"), spec_of(name), dtype=LOW_WEIGHTS), range(len(graph.units))
    memory = MemoryCost(profile, "adamw")
    # Copies are of what is trained alone.
    assert memory.state_bytes(every) == graph.parameter_bytes + 3.5 * graph.trained_bytes
    assert SpanTables(profile, optimizer="adamw", splits=True).state()[0, -1] == memory.state_bytes(every)
    gathered = graph.gathered_bytes(every, 0.5)
    assert sum(gathered) == graph.parameter_bytes - graph.trained_bytes / 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", LOW_WEIGHTS])
def test_a_keeper_has_frozen_parameters_from_the_beginning(dtype, name, make_plan):
    plan = replace(plan_of(make_plan, name, [[1], [1]]), dtype=dtype)
    plan = replace(plan, stages=(replace(plan.stages[0], keepers=("s1r0",)), plan.stages[1]))
    ran = train_in_threads(plan, JOB)
    (kept,) = ran.sessions["s1r0"]._keeping.kept
    own = ran.sessions["s0r0"]._part.holding.parameters
    assert kept.holding.parameters.keys() == own.keys()
    assert all(torch.equal(parameter, kept.holding.parameters[name]) for name, parameter in own.items())
    assert len(kept.optimizer.state) == sum(parameter.requires_grad for parameter in own.values())
