"""ResNet and EfficientNet as units: stem; each block; pooling, classifier and loss.

Batch statistics are frozen (mean 0, variance 1), so nothing rescales a layer's output while training, and the
initial weights alone must keep the size of activations even through a deep model. The rules of the transformers
library count on live batch statistics (ResNet's fan-out rule; EfficientNet's 0.02 for the scales of the
normalization), so these are used instead: each convolution keeps the variance of its input (He et al. 2015,
fan-in), and each residual branch starts scaled down by the square root of the number of branches (the idea of
Zhang et al. 2019, "Fixup", without its zeros, which would make the first step's gradients zero).
"""

import math
from itertools import accumulate

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.efficientnet.configuration_efficientnet import EfficientNetConfig
from transformers.models.efficientnet.modeling_efficientnet import (
    EfficientNetBlock,
    EfficientNetEmbeddings,
    round_filters,
)
from transformers.models.resnet.configuration_resnet import ResNetConfig
from transformers.models.resnet.modeling_resnet import ResNetBottleNeckLayer, ResNetEmbeddings

from spantrain.core.units import ModelSpec
from spantrain.models.catalog.catalog import CatalogFamily
from spantrain.models.units import HeadUnit, ModuleUnit, UnitModule

_RELU_GAIN = 2.0
"""One over the mean square of relu(x) for a standard normal x."""
_SWISH_GAIN = 2.8
"""The same for x * sigmoid(x)."""
# A squeeze-and-excite gate starts near one half, which quarters the variance that the projection sees.
_GATED_GAIN = 4 * _SWISH_GAIN


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
    """Stem, blocks, classifier."""

    whole = "ResNetForImageClassification"
    head = ResNetHead

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

    def initialize(self, unit: UnitModule) -> None:
        """Draw the weights of a unit."""
        _init_normalization(unit)
        for path, module in unit.named_modules():
            if isinstance(module, nn.Conv2d):
                # What a stem or a shortcut makes is not only passed through a relu: it keeps its variance.
                _init_convolution(module, 1.0 if "embedder" in path or "shortcut" in path else _RELU_GAIN)
            elif isinstance(module, nn.Linear):
                module.reset_parameters()
            elif isinstance(module, ResNetBottleNeckLayer):
                _init_normalization(module.layer[-1], scale=1 / math.sqrt(self.blocks))


class EfficientNetHead(HeadUnit):
    """Top convolution, mean over the image, classifier, loss."""

    def __init__(self, name: str, config: EfficientNetConfig) -> None:
        encoder = "efficientnet.encoder"
        prefixes = {"top_conv": f"{encoder}.top_conv", "top_bn": f"{encoder}.top_bn", "classifier": "classifier"}
        super().__init__(name, prefixes=prefixes)
        width = round_filters(config, config.out_channels[-1])
        self.top_conv = nn.Conv2d(width, config.hidden_dim, kernel_size=1, bias=False)
        self.top_bn = nn.BatchNorm2d(config.hidden_dim, eps=config.batch_norm_eps)
        self.top_activation = ACT2FN[config.hidden_act]
        self.classifier = nn.Linear(config.hidden_dim, config.num_labels)
        self.eval()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `(samples, classes)`."""
        top = self.top_activation(self.top_bn(self.top_conv(hidden)))
        logits: Tensor = self.classifier(top.mean(dim=(2, 3)))
        return logits


class EfficientNetFamily(CatalogFamily):
    """Stem, blocks, classifier."""

    whole = "EfficientNetForImageClassification"
    head = EfficientNetHead

    @staticmethod
    def configuration(spec: ModelSpec) -> EfficientNetConfig:
        """Return it without dropped paths."""
        return EfficientNetConfig(**spec.config, dropout_rate=0.0, drop_connect_rate=0.0)

    def first(self, name: str) -> UnitModule:
        """Build the stem."""
        return ModuleUnit(name, EfficientNetEmbeddings(self.config))

    def block(self, index: int) -> nn.Module:
        """Build an MBConv block."""
        config = self.config
        ends = list(accumulate(math.ceil(config.depth_coefficient * repeat) for repeat in config.num_block_repeats))
        group = next(number for number, end in enumerate(ends) if index < end)
        first = index == (ends[group - 1] if group else 0)
        width = round_filters(config, config.out_channels[group])
        block: nn.Module = EfficientNetBlock(
            config=config,
            in_dim=round_filters(config, config.in_channels[group]) if first else width,
            out_dim=width,
            stride=config.strides[group] if first else 1,
            expand_ratio=config.expand_ratios[group],
            kernel_size=config.kernel_sizes[group],
            drop_rate=0.0,
            id_skip=first,
            adjust_padding=index not in config.depthwise_padding,
        )
        return block

    def initialize(self, unit: UnitModule) -> None:
        """Draw the weights of a unit."""
        _init_normalization(unit)
        gains = {"depthwise_conv": _SWISH_GAIN, "project_conv": _GATED_GAIN}
        for path, module in unit.named_modules():
            if isinstance(module, nn.Conv2d):
                _init_convolution(module, gains.get(path.rpartition(".")[2], 1.0))
            elif isinstance(module, nn.Linear):
                module.reset_parameters()
            elif isinstance(module, EfficientNetBlock) and module.projection.apply_dropout:
                # `apply_dropout` is the library's word for: this block adds its input to its output.
                _init_normalization(module.projection, scale=1 / math.sqrt(self.blocks))


def _init_convolution(convolution: nn.Module, gain: float) -> None:
    """Draw weights with variance gain / fan-in; set the bias, if any, to zero."""
    weight, bias = convolution.weight, convolution.bias
    assert isinstance(weight, Tensor)
    nn.init.normal_(weight, std=math.sqrt(gain / weight[0].numel()))
    if isinstance(bias, Tensor):
        nn.init.zeros_(bias)


def _init_normalization(module: nn.Module, scale: float = 1.0) -> None:
    """Set every batch normalization to statistics (0, 1), bias 0 and the given scale."""
    for child in module.modules():
        if isinstance(child, nn.BatchNorm2d):
            child.reset_parameters()
            nn.init.constant_(child.weight, scale)
