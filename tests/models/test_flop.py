"""Operations are those that torch counts, and counting them touches no other thread."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from spantrain.models.build import build_units, example_inputs, example_rows
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.execution.measure import FlopMeter
from spantrain.models.units import LABELS


@pytest.mark.parametrize("name", ["gpt2-tiny", "bert-small-tiny", "resnet-tiny", "efficientnet-tiny"])
def test_operations_are_those_that_torch_counts(name):
    spec = resolve_model(name)
    units = build_units(spec, seed=0)

    def work():
        tensors = example_inputs(spec, 2)
        for unit in units[:-1]:
            tensors = unit(*tensors)
        units[-1](*tensors, example_rows(spec, 2)[LABELS]).backward()

    with FlopCounterMode(display=False) as known:
        work()
    with FlopMeter() as meter:
        work()
    assert meter.total == known.get_total_flops() > 0


def test_modules_of_other_threads_are_left_alone():
    seen = []
    with FlopMeter() as meter:
        assert not torch.nn.modules.module._global_forward_hooks
        other = threading.Thread(target=lambda: seen.append(nn.Linear(4, 4)(torch.ones(1, 4))))
        other.start()
        other.join()
    assert len(seen) == 1
    assert meter.total == 0
