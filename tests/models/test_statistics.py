"""Running statistics are state: they have the unsplit model's names, and members of a group hold parts of them."""

import pytest
import torch

from spantrain.models.build import build_units, unit_count, whole_model
from spantrain.models.statistics import named_statistics, statistics_parts
from spantrain.models.tensor_parallel.group import ThreadGroup
from spantrain.models.tensor_parallel.shard import shard_units
from testing.runtime.parts import put


@pytest.mark.parametrize("family", ["resnet", "efficientnet"])
def test_names_are_the_unsplit_models(family, small_spec):
    spec = small_spec(family)
    buffers = dict(whole_model(spec, seed=0).module.named_buffers())
    found = named_statistics(build_units(spec, seed=0))
    assert found.keys() == {name for name in buffers if not name.endswith("position_ids")}
    assert all(tensor.shape == buffers[name].shape for name, tensor in found.items())


@pytest.mark.parametrize("family", ["resnet", "efficientnet"])
def test_members_hold_parts_of_what_they_divide(family, small_spec):
    spec = small_spec(family)
    whole = named_statistics(build_units(spec, seed=0))
    values = {name: torch.randn(tensor.shape).to(tensor.dtype) for name, tensor in whole.items()}
    found = {name: torch.zeros_like(value) for name, value in values.items()}
    divided = 0
    for rank, group in enumerate(ThreadGroup.together(2)):
        units = build_units(spec, range(unit_count(spec)), seed=0)
        for name, tensor in named_statistics(units).items():
            tensor.copy_(values[name])
        shard_units(units, (1.0, 2.0), rank, group)
        parts = statistics_parts(units)
        held = named_statistics(units)
        assert parts.keys() == held.keys() == whole.keys()
        for name, tensor in held.items():
            put(found[name], parts[name], tensor)
        divided += sum(not part.is_whole for part in parts.values())
    assert divided
    assert all(torch.equal(found[name], value) for name, value in values.items() if value.dim())
