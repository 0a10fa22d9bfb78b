"""A model of one's own, trained over several places without a line in it about that: a small U-Net.

    spantrain train --model examples/my_model.py:build --preset laptop --steps 20

`build` returns the model, an example batch (samples first) and the loss; without `--data` the batch is trained on again
and again. The long skips cross every cut between their two ends, each as a tensor of its own.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTHS = (8, 16, 32)
SIDE = 32
SAMPLES = 64


class DoubleConvolution(nn.Module):
    """Two convolutions, each normalized and rectified; normalization is by groups, not by the batch."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1),
            nn.GroupNorm(4, after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1),
            nn.GroupNorm(4, after),
            nn.ReLU(inplace=True),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return `(samples, after, height, width)`."""
        return self.layers(images)


class UNet(nn.Module):
    """Down through halves of the size, up again, with what was left on the way down joined in on the way up."""

    def __init__(self) -> None:
        super().__init__()
        befores = (1, *WIDTHS[:-1])
        self.down = nn.ModuleList(DoubleConvolution(a, b) for a, b in zip(befores, WIDTHS, strict=True))
        self.bottom = DoubleConvolution(WIDTHS[-1], WIDTHS[-1])
        afters = (WIDTHS[0], *WIDTHS[:-1])
        pairs = zip(reversed(WIDTHS), reversed(afters), strict=True)
        self.up = nn.ModuleList(DoubleConvolution(2 * width, after) for width, after in pairs)
        self.last = nn.Conv2d(WIDTHS[0], 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return what is drawn on images `(samples, 1, height, width)`, of the same shape."""
        skips = []
        for block in self.down:
            images = block(images)
            skips.append(images)
            images = functional.max_pool2d(images, 2)
        images = self.bottom(images)
        for block in self.up:
            images = functional.interpolate(images, scale_factor=2.0)
            images = block(torch.cat([images, skips.pop()], dim=1))
        return self.last(images)


def loss(drawn: Tensor, wanted: Tensor) -> Tensor:
    """Return each sample's mean squared error."""
    return (drawn - wanted).square().flatten(1).mean(dim=1)


def build() -> tuple[nn.Module, tuple[Tensor, Tensor], object]:
    """Return the model, an example batch of noisy discs and the discs themselves, and the loss."""
    centres = torch.rand(SAMPLES, 2, 1, 1) * SIDE
    rows, columns = torch.arange(SIDE).view(1, -1, 1), torch.arange(SIDE).view(1, 1, -1)
    far = (rows - centres[:, 0]).square() + (columns - centres[:, 1]).square()
    discs = (far < (SIDE / 5) ** 2).float().unsqueeze(1)
    return UNet(), (discs + 0.5 * torch.randn_like(discs), discs), loss
