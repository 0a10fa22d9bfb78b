"""Small models of each family, and one process's own way through them, for tests of the models layer."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spantrain.core.units import ModelSpec
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.units import UnitModule

FAMILIES = ("gpt2", "bert", "resnet", "efficientnet")


def small_spec(family: str) -> ModelSpec:
    """A model of the family that builds and runs in milliseconds."""
    match family:
        case "gpt2":
            spec = resolve_model("gpt2-tiny", sequence_length=16)
            return replace(spec, config={**spec.config, "n_layer": 3, "n_embd": 32})
        case "bert":
            spec = resolve_model("bert-small-tiny", sequence_length=16)
            sizes = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64}
            return replace(spec, config={**spec.config, **sizes})
        case "resnet":
            spec = resolve_model("resnet-tiny")
            return replace(spec, config={**spec.config, "depths": (2, 2), "hidden_sizes": (32, 64)})
        case _:
            spec = resolve_model("efficientnet-tiny")
            groups = ("kernel_sizes", "in_channels", "out_channels", "strides", "expand_ratios")
            cut = {field: spec.config[field][:3] for field in groups}  # type: ignore[index]
            return replace(spec, config={**spec.config, **cut, "num_block_repeats": (1, 2, 2)})


def chain_loss(units: Sequence[UnitModule], inputs: tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """Summed loss of all units in turn."""
    hidden = inputs
    for unit in units[:-1]:
        hidden = unit(*hidden)
    return units[-1](*hidden, labels)


@pytest.fixture(params=FAMILIES)
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    return small_spec(request.param)


@pytest.fixture(name="small_spec")
def small_spec_factory():
    return small_spec


@pytest.fixture(name="chain_loss")
def chain_loss_function():
    return chain_loss


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
