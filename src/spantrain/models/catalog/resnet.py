"""ResNet as units: stem; each residual block; pooling, classifier and loss."""

import math

from torch import Tensor, nn
from transformers.models.resnet.configuration_resnet import ResNetConfig
from transformers.models.resnet.modeling_resnet import ResNetBottleNeckLayer, ResNetEmbeddings

from spantrain.core.units import ModelSpec
from spantrain.models.catalog.catalog import unit_names
from spantrain.models.catalog.units_init import (
    RELU_GAIN,
    init_convolution,
    init_normalization,
    linear_uniform,
)
from spantrain.models.units import ModuleUnit, UnitModule, sample_losses


def configuration(spec: ModelSpec) -> ResNetConfig:
    """Return the transformers configuration."""
    return ResNetConfig(**{key: _plain(value) for key, value in spec.config.items()})


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


class ResNetHead(UnitModule):
    """Mean over the image, classifier, loss."""

    def __init__(self, name: str, config: ResNetConfig) -> None:
        super().__init__(name, prefixes={"classifier": name})
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(config.hidden_sizes[-1], config.num_labels))
        self.eval()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `(samples, classes)`."""
        logits: Tensor = self.classifier(hidden.mean(dim=(2, 3)))
        return logits

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the loss summed over samples."""
        return sample_losses(self.logits(hidden), labels).sum()


def make_unit(spec: ModelSpec, index: int) -> UnitModule:
    """Build one unit; its weights are to be drawn by `initialize`."""
    names, config = unit_names(spec), configuration(spec)
    if index == 0:
        return ModuleUnit(names[index], ResNetEmbeddings(config))
    if index == len(names) - 1:
        return ResNetHead(names[index], config)
    return ModuleUnit(names[index], _block(config, index - 1))


def _block(config: ResNetConfig, index: int) -> nn.Module:
    stage = 0
    while index >= config.depths[stage]:
        index -= config.depths[stage]
        stage += 1
    width = config.hidden_sizes[stage]
    before = config.hidden_sizes[stage - 1] if stage else config.embedding_size
    block: nn.Module = ResNetBottleNeckLayer(
        in_channels=width if index else before,
        out_channels=width,
        stride=2 if index == 0 and (stage or config.downsample_in_first_stage) else 1,
        activation=config.hidden_act,
        downsample_in_bottleneck=config.downsample_in_bottleneck,
    )
    return block


def initialize(spec: ModelSpec, unit: UnitModule) -> None:
    """Draw the weights of a unit (`units_init` says by which rules and why)."""
    init_normalization(unit)
    for path, module in unit.named_modules():
        if isinstance(module, nn.Conv2d):
            # What a stem or a shortcut makes is not only passed through a relu: it keeps its variance.
            init_convolution(module, 1.0 if "embedder" in path or "shortcut" in path else RELU_GAIN)
        elif isinstance(module, nn.Linear):
            linear_uniform(module)
        elif isinstance(module, ResNetBottleNeckLayer):
            blocks = len(unit_names(spec)) - 2
            init_normalization(module.layer[-1], scale=1 / math.sqrt(blocks))
