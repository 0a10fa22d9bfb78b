"""EfficientNet as units: stem; each MBConv block; top convolution, pooling, classifier and loss."""

import math
from itertools import pairwise

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.efficientnet.configuration_efficientnet import EfficientNetConfig
from transformers.models.efficientnet.modeling_efficientnet import (
    EfficientNetBlock,
    EfficientNetEmbeddings,
    round_filters,
)

from spantrain.core.units import ModelSpec
from spantrain.models.catalog.catalog import unit_names
from spantrain.models.catalog.units_init import (
    SWISH_GAIN,
    init_convolution,
    init_normalization,
    linear_uniform,
)
from spantrain.models.units import ModuleUnit, UnitModule, sample_losses

# A squeeze-and-excite gate starts near one half, which quarters the variance that the projection sees.
_GATED_GAIN = 4 * SWISH_GAIN


def configuration(spec: ModelSpec) -> EfficientNetConfig:
    """Return the transformers configuration: no dropout, no dropped paths."""
    return EfficientNetConfig(**spec.config, dropout_rate=0.0, drop_connect_rate=0.0)


class EfficientNetHead(UnitModule):
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

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the loss summed over samples."""
        return sample_losses(self.logits(hidden), labels).sum()


def make_unit(spec: ModelSpec, index: int) -> UnitModule:
    """Build one unit; its weights are to be drawn by `initialize`."""
    names, config = unit_names(spec), configuration(spec)
    if index == 0:
        return ModuleUnit(names[index], EfficientNetEmbeddings(config))
    if index == len(names) - 1:
        return EfficientNetHead(names[index], config)
    return ModuleUnit(names[index], _block(config, index - 1))


def _block(config: EfficientNetConfig, index: int) -> nn.Module:
    repeats = [math.ceil(config.depth_coefficient * repeat) for repeat in config.num_block_repeats]
    starts = [sum(repeats[:group]) for group in range(len(repeats) + 1)]
    group = next(g for g, (start, end) in enumerate(pairwise(starts)) if start <= index < end)
    first = index == starts[group]
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


def initialize(spec: ModelSpec, unit: UnitModule) -> None:
    """Draw the weights of a unit (`units_init` says by which rules and why)."""
    init_normalization(unit)
    gains = {"depthwise_conv": SWISH_GAIN, "project_conv": _GATED_GAIN}
    for path, module in unit.named_modules():
        if isinstance(module, nn.Conv2d):
            init_convolution(module, gains.get(path.rpartition(".")[2], 1.0))
        elif isinstance(module, nn.Linear):
            linear_uniform(module)
        elif isinstance(module, EfficientNetBlock) and module.projection.apply_dropout:
            # `apply_dropout` is the library's word for: this block adds its input to its output.
            blocks = len(unit_names(spec)) - 2
            init_normalization(module.projection, scale=1 / math.sqrt(blocks))
