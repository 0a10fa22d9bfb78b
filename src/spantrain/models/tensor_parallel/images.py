"""Regions of convolutions: ResNet's residual blocks, EfficientNet's blocks and its top, pairs in an `nn.Sequential`.

Convolutions are divided by output channels, the next by input channels; batch normalizations, whose statistics are
frozen, go with the channels. A bottleneck's middle convolution reads all channels of the first, which are gathered: a
quarter of the block's width. A shortcut's convolution is computed whole by every member.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from torch import nn

from spantrain.models.tensor_parallel.rules import ELEMENTWISE, Column, Region, below, child


def image_regions(unit: nn.Module) -> Iterator[Region]:
    """Yield the regions of a unit that are made of convolutions."""
    for anchor, module in unit.named_modules():
        found = _pairs(anchor, module) if type(module) is nn.Sequential else [_of_class(anchor, module)]
        yield from (region for region in found if region is not None and _all_there(unit, region))


def _pairs(anchor: str, module: nn.Module) -> Iterator[Region | None]:
    """Yield pairs of convolutions with batch normalizations and elementwise modules between them."""
    first, channels = "", list[str]()
    for name, part in module.named_children():
        if isinstance(part, nn.BatchNorm2d) and first:
            channels.append(name)
        elif type(part) is nn.Conv2d and part.groups == 1:
            if first:
                columns = (Column(path=first),)
                yield _by_channels(anchor, child(module, first), columns=columns, rows=(name,), channels=channels)
            first, channels = "" if first else name, []
        elif not isinstance(part, ELEMENTWISE):
            first = ""


def _inverted(anchor: str, module: nn.Module) -> Region | None:
    depthwise = "depthwise_conv.depthwise_conv"
    columns = [Column(path="squeeze_excite.expand")]
    channels, sliced = ["depthwise_conv.depthwise_norm"], [depthwise]
    if child(module, "expansion.expand_conv") is not None:
        columns.append(Column(path="expansion.expand_conv"))
        channels += ["expansion.expand_bn", *sliced]
        sliced = []
    rows = ("squeeze_excite.reduce", "projection.project_conv")
    return _by_channels(anchor, child(module, depthwise), columns=columns, rows=rows, channels=channels, sliced=sliced)


def _by_channels(
    anchor: str,
    convolution: nn.Module | None,
    *,
    columns: Sequence[Column],
    rows: Sequence[str],
    channels: Sequence[str],
    sliced: Sequence[str] = (),
) -> Region | None:
    """Return a region of as many pieces as a convolution has output channels; paths are those below the anchor."""
    if not isinstance(convolution, nn.Conv2d):
        return None
    return Region(
        anchor=anchor,
        pieces=convolution.out_channels,
        columns=tuple(replace(column, path=below(anchor, column.path)) for column in columns),
        rows=tuple(below(anchor, path) for path in rows),
        channels=tuple(below(anchor, path) for path in channels),
        sliced=tuple(below(anchor, path) for path in sliced),
    )


_CHAINS: Mapping[str, tuple[tuple[Column, ...], str, tuple[str, ...]]] = MappingProxyType(
    {
        "EfficientNetHead": ((Column(path="top_conv"),), "classifier", ("top_bn",)),
        "ResNetBasicLayer": ((Column(path="layer.0.convolution"),), "layer.1.convolution", ("layer.0.normalization",)),
        "ResNetBottleNeckLayer": (
            (Column(path="layer.0.convolution"), Column(path="layer.1.convolution", gathers=True)),
            "layer.2.convolution",
            ("layer.0.normalization", "layer.1.normalization"),
        ),
    }
)
"""By class: column-wise layers, the row-wise one behind them, and batch normalizations between."""


def _of_class(anchor: str, module: nn.Module) -> Region | None:
    name = type(module).__name__
    if name == "EfficientNetBlock":
        return _inverted(anchor, module)
    if name not in _CHAINS:
        return None
    columns, row, channels = _CHAINS[name]
    return _by_channels(anchor, child(module, columns[0].path), columns=columns, rows=(row,), channels=channels)


def _all_there(unit: nn.Module, region: Region) -> bool:
    """Whether every module is there and of a kind with a rule; so is a convolution with zeros around what it reads."""
    modules = [child(unit, path) for path in region.paths]
    if not all(isinstance(child(unit, path), nn.BatchNorm2d | nn.Conv2d) for path in region.channels):
        return False
    convolutions = [module for module in modules if isinstance(module, nn.Conv2d)]
    return None not in modules and all(module.padding_mode == "zeros" for module in convolutions)
