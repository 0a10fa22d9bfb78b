"""What a module makes of few parameters alone is made again in the units that need it, and crosses no cut."""

import pytest
import torch
from torch import Tensor

from spantrain.models.build import build_units, unit_names
from spantrain.models.tracing.model import cut_model
from spantrain.models.tracing.tape import Deriving, Value
from testing.models.library_models import library_spec

pytestmark = pytest.mark.models

TABLES = [f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight" for side in ("encoder", "decoder")]


def test_t5_makes_its_bias_of_positions_in_every_block(tmp_path) -> None:
    spec = library_spec("t5", tmp_path)
    cut = cut_model(spec)
    names = unit_names(spec)
    assert all(one.dim is not None for part in cut.parts for one in part.gives)
    units = dict(zip(names, build_units(spec, seed=3), strict=True))
    for side, table in zip(("encoder", "decoder"), TABLES, strict=True):
        first, second = units[f"{side}.block.0"], units[f"{side}.block.1"]
        assert table in first.shared
        assert first.get_parameter(first.shared[table]) is second.get_parameter(second.shared[table])


def test_numbers_are_those_that_the_module_makes(tmp_path) -> None:
    spec = library_spec("t5", tmp_path)
    names, cut = unit_names(spec), cut_model(spec)
    first, second = build_units(spec, [names.index(f"encoder.block.{number}") for number in (0, 1)], seed=3)
    attention = next(module for module in first.modules() if getattr(module, "has_relative_attention_bias", False))
    seen: list[Tensor] = []
    table = second.get_parameter(second.shared[TABLES[0]])
    for step in cut.parts[names.index("encoder.block.1")].steps[:3]:
        given = [seen[-1:] or [step.args[0].tensor, table], step.args[1:] if seen else step.args[2:]]
        assert step.function is not None
        seen.append(step.function(*given[0], *given[1], **step.kwargs))
    tokens = cut.whole.batch.inputs[0].shape[1]
    torch.testing.assert_close(seen[-1], attention.compute_bias(tokens, tokens))


def test_what_was_written_into_is_sent() -> None:
    weight, mask = torch.ones(3, 2), torch.full((2, 3), 4.0)
    deriving = Deriving({id(weight): "table"}, {"table": 24})

    def noted(func, *args: Tensor) -> Tensor:
        result = func(*args)
        deriving.note(func, args, {}, result, lambda tensor: tensor is mask)
        return result

    turned = noted(torch.t, weight)
    masked = noted(torch.add, turned, mask)
    found = deriving.of(masked, Value(7))
    assert found is not None
    assert found.weight_bytes == 24
    assert [step.function for step in found.steps] == [torch.t, torch.add]
    assert found.steps[-1].makes == (Value(7),)
    turned.add_(1)
    assert deriving.of(masked, Value(7)) is None


def test_what_is_made_of_data_is_sent() -> None:
    weight, data = torch.ones(3, 2), torch.ones(3, 2)
    deriving = Deriving({id(weight): "table"}, {"table": 24})
    result = weight + data
    deriving.note(torch.add, (weight, data), {}, result, lambda _: False)
    assert deriving.of(result, Value(0)) is None
