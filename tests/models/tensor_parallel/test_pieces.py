"""What the unit graph says of members, by whole pieces, is what the divided units are: of each catalog family."""

from functools import partial

import pytest
import torch
from torch import nn

from spantrain.config.artefacts import shipped_graph
from spantrain.core.shares import MemberShare, shares_of
from spantrain.core.units import UnitGraph
from spantrain.models.build import build_units, empty_unit, example_rows, unit_count
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.execution.measure import HeldBehind, held_behind, held_by_two
from spantrain.models.tensor_parallel.group import TensorGroup
from spantrain.models.tensor_parallel.shard import pieces_of, shard_units
from spantrain.models.units import ModuleUnit, Rows, parameter_names
from spantrain.runtime.step.stage_member import unit_shares
from testing.models.thread_group import ThreadGroup, run_members

MODELS = ("gpt2-tiny", "bert-small-tiny", "resnet-tiny", "efficientnet-tiny")


def graph_of(model: str) -> UnitGraph:
    graph = shipped_graph(resolve_model(model))
    assert graph is not None
    return graph


@pytest.mark.parametrize("shares", [(2.0, 1.0), (5.0, 2.0, 1.0)], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_work_and_parameters_are_those_of_the_parts_that_members_hold(model: str, shares: tuple[float, ...]) -> None:
    graph, spec = graph_of(model), resolve_model(model)
    for share, group in zip(shares_of(shares), ThreadGroup.together(len(shares)), strict=True):
        units = [empty_unit(spec, index) for index in range(unit_count(spec))]
        names = [tuple(parameter_names(unit).values()) for unit in units]
        held = [shard_units([unit], shares, share.rank, group) for unit in units]
        for index, (unit, parts, own) in enumerate(zip(units, held, names, strict=True)):
            assert graph.units[index].work_share(share) == pytest.approx(unit_shares(parts, [own])[0]), unit.name
            held_bytes = sum(parameter.nbytes for parameter in unit.parameters())
            assert graph.held_parameter_bytes(range(index, index + 1), share) == (held_bytes,), unit.name


def member_held(group: TensorGroup, model: str, index: int, shares: tuple[float, ...], samples: int) -> HeldBehind:
    spec, graph = resolve_model(model), graph_of(model)
    units = build_units(spec, [index], seed=0)
    shard_units(units, shares, group.rank, group)

    def batch() -> tuple[tuple[torch.Tensor, ...], Rows]:
        entering = graph.units[index - 1].outputs if index else ()
        tensors = (torch.zeros(samples, *t.shape_per_sample, requires_grad=True) for t in entering)
        return tuple(tensors), example_rows(spec, samples)

    return held_behind(units[0], batch, None, ends_model=index == len(graph.units) - 1)


@pytest.mark.parametrize("shares", [(2.0, 1.0), (1.0, 1.0, 2.0)], ids=str)
@pytest.mark.parametrize(
    ("model", "index"),
    [("gpt2-tiny", 0), ("gpt2-tiny", 3), ("bert-small-tiny", 9), ("resnet-tiny", 4), ("efficientnet-tiny", 5)],
    ids=["an embedding", "a block", "with a whole transform", "with a whole shortcut", "with squeezed channels"],
)
def test_members_hold_what_the_graph_says(model: str, index: int, shares: tuple[float, ...]) -> None:
    few, many = (
        run_members(len(shares), partial(member_held, model=model, index=index, shares=shares, samples=samples))
        for samples in (1, 3)
    )
    graph = graph_of(model)
    for share, one, three in zip(shares_of(shares), few, many, strict=True):
        # What does not grow with the samples is not counted.
        forward_bytes = (three.forward_bytes - one.forward_bytes) / 2
        deferred_bytes = (three.backward_input_bytes - one.backward_input_bytes) / 2
        assert graph.held_activation_bytes(index, share) == pytest.approx(forward_bytes, rel=0.02)
        deferred = graph.stage_deferred_bytes(range(index, index + 1), share)
        assert deferred == pytest.approx(deferred_bytes, rel=0.02)


def test_heads_and_columns_are_told_apart() -> None:
    heads, columns = pieces_of(empty_unit(resolve_model("gpt2-tiny"), 1))
    assert (heads.pieces, columns.pieces) == (4, 256)
    assert (heads.work_share, columns.work_share) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    block = graph_of("gpt2-tiny").units[1]
    assert [block.work_share(MemberShare(shares=(2.0, 1.0), rank=rank)) for rank in (0, 1)] == [
        pytest.approx(3 / 4 / 3 + 171 / 256 * 2 / 3),
        pytest.approx(1 / 4 / 3 + 85 / 256 * 2 / 3),
    ]
    (rows,) = pieces_of(empty_unit(resolve_model("gpt2-tiny"), 13))
    assert (rows.pieces, rows.shared) == (256, ("wte",))


class ReadsItsWidth(nn.Module):
    """Works only with all of its columns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Fail where a part of the columns is there."""
        hidden = self.layers[0](hidden).view(-1, 16)
        return self.layers[2](self.layers[1](hidden))


def test_a_unit_that_does_not_run_divided_is_said_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    unit = ModuleUnit("odd", ReadsItsWidth())
    assert not held_by_two(unit, lambda: ((torch.zeros(1, 8, requires_grad=True),), {}), None, ends_model=False)
    assert "odd does not run divided among two devices" in caplog.text
    assert unit.body.layers[0].weight.shape == (16, 8)
