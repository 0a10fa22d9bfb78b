"""ResNet as units: stem; each residual block; pooling, classifier and loss."""

import math

from torch import Tensor, nn
from transformers.models.resnet.configuration_resnet import ResNetConfig
from transformers.models.resnet.modeling_resnet import ResNetBottleNeckLayer, ResNetEmbeddings

from spantrain.core.units import ModelSpec
from spantrain.models.catalog.family import CatalogFamily
from spantrain.models.catalog.units_init import RELU_GAIN, init_convolution, init_normalization, linear_uniform
from spantrain.models.units import HeadUnit, ModuleUnit, UnitModule


class ResNetHead(HeadUnit):
    """Mean over the image, classifier, loss."""

    def __init__(self, name: str, config: ResNetConfig) -> None:
        super().__init__(name, prefixes={"classifier": name})
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(config.hidden_sizes[-1], config.num_labels))
        self.eval()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `(samples, classes)`."""
        logits: Tensor = self.classifier(hidden.mean(dim=(2, 3)))
        return logits


class ResNetFamily(CatalogFamily):
    """Weights are drawn by the rules of `units_init`."""

    whole = "ResNetForImageClassification"

    @staticmethod
    def configuration(spec: ModelSpec) -> ResNetConfig:
        """Return it with lists in the place of tuples."""
        return ResNetConfig(**{k: list(v) if isinstance(v, tuple) else v for k, v in spec.config.items()})

    def first(self, name: str) -> UnitModule:
        """Build the stem."""
        return ModuleUnit(name, ResNetEmbeddings(self.config))

    def block(self, index: int) -> nn.Module:
        """Build a residual block."""
        config, stage = self.config, 0
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

    def last(self, name: str) -> UnitModule:
        """Build the classifier."""
        return ResNetHead(name, self.config)

    def initialize(self, unit: UnitModule) -> None:
        """Draw the weights of a unit."""
        init_normalization(unit)
        for path, module in unit.named_modules():
            if isinstance(module, nn.Conv2d):
                # What a stem or a shortcut makes is not only passed through a relu: it keeps its variance.
                init_convolution(module, 1.0 if "embedder" in path or "shortcut" in path else RELU_GAIN)
            elif isinstance(module, nn.Linear):
                linear_uniform(module)
            elif isinstance(module, ResNetBottleNeckLayer):
                init_normalization(module.layer[-1], scale=1 / math.sqrt(self.blocks))
