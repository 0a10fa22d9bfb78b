"""A checkpoint as the `state_dict` of the unsplit model."""

from pathlib import Path
from typing import TYPE_CHECKING

from spantrain.app.export.export import manifest_with, trained_parameters
from spantrain.core.units import ModelSpec
from spantrain.models.data.choice import user_functions
from spantrain.models.whole import whole_model, whole_parameters
from spantrain.runtime.checkpoint.manifest import read_manifest

if TYPE_CHECKING:
    import torch


def state_of(folder: Path, model: ModelSpec) -> "dict[str, torch.Tensor]":
    """Return what the unsplit model's `load_state_dict` takes; buffers are those that it is made with.

    Raises:
        ConfigError: it is no complete checkpoint, or a file is damaged, or lies on another machine; or it is of a model
            from another function than `model`.
    """
    manifest = manifest_with(read_manifest(folder), user_functions(model))
    parameters = whole_parameters(manifest.model)
    state: dict[str, torch.Tensor] = whole_model(
        manifest.model, seed=manifest.job.seed if manifest.job else 0
    ).module.state_dict()
    for name, tensor in trained_parameters(folder, manifest).items():
        state.update(dict.fromkeys((name, *parameters[name].other_names), tensor))
    return state
