"""EfficientNet as units: stem; each MBConv block; top convolution, pooling, classifier and loss."""

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

from spantrain.core.units import ModelSpec
from spantrain.models.catalog.family import CatalogFamily
from spantrain.models.catalog.units_init import SWISH_GAIN, init_convolution, init_normalization, linear_uniform
from spantrain.models.units import HeadUnit, ModuleUnit, UnitModule

# A squeeze-and-excite gate starts near one half, which quarters the variance that the projection sees.
_GATED_GAIN = 4 * SWISH_GAIN


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
    """Weights are drawn by the rules of `units_init`."""

    whole = "EfficientNetForImageClassification"

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

    def last(self, name: str) -> UnitModule:
        """Build the classifier."""
        return EfficientNetHead(name, self.config)

    def initialize(self, unit: UnitModule) -> None:
        """Draw the weights of a unit."""
        init_normalization(unit)
        gains = {"depthwise_conv": SWISH_GAIN, "project_conv": _GATED_GAIN}
        for path, module in unit.named_modules():
            if isinstance(module, nn.Conv2d):
                init_convolution(module, gains.get(path.rpartition(".")[2], 1.0))
            elif isinstance(module, nn.Linear):
                linear_uniform(module)
            elif isinstance(module, EfficientNetBlock) and module.projection.apply_dropout:
                # `apply_dropout` is the library's word for: this block adds its input to its output.
                init_normalization(module.projection, scale=1 / math.sqrt(self.blocks))
