"""Initial weights of the image models.

Batch statistics are frozen (mean 0, variance 1), so nothing rescales a layer's output while training, and the
initial weights alone must keep the size of activations even through a deep model. The rules of the transformers
library count on live batch statistics (ResNet's fan-out rule; EfficientNet's 0.02 for the scales of the
normalization), so these are used instead: each convolution keeps the variance of its input (He et al. 2015,
fan-in), and each residual branch starts scaled down by the square root of the number of branches (the idea of
Zhang et al. 2019, "Fixup", without its zeros, which would make the first step's gradients zero).
"""

import math

from torch import Tensor, nn

RELU_GAIN = 2.0
"""One over the mean square of relu(x) for a standard normal x."""
SWISH_GAIN = 2.8
"""The same for x * sigmoid(x)."""


def init_convolution(convolution: nn.Module, gain: float) -> None:
    """Draw weights with variance gain / fan-in; set the bias, if any, to zero."""
    weight, bias = convolution.weight, convolution.bias
    assert isinstance(weight, Tensor)
    nn.init.normal_(weight, std=math.sqrt(gain / weight[0].numel()))
    if isinstance(bias, Tensor):
        nn.init.zeros_(bias)


def init_normalization(module: nn.Module, scale: float = 1.0) -> None:
    """Set every batch normalization to statistics (0, 1), bias 0 and the given scale."""
    for child in module.modules():
        if isinstance(child, nn.BatchNorm2d):
            child.reset_parameters()
            nn.init.constant_(child.weight, scale)


def linear_uniform(linear: nn.Linear) -> None:
    """Draw weights and bias uniformly within one over the square root of the inputs (torch's own rule)."""
    bound = 1 / math.sqrt(linear.in_features)
    nn.init.uniform_(linear.weight, -bound, bound)
    nn.init.uniform_(linear.bias, -bound, bound)
