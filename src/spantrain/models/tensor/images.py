"""Regions of convolutions: ResNet's residual blocks, EfficientNet's blocks and its top, pairs in an `nn.Sequential`.

Convolutions are divided by output channels, the next by input channels; batch normalizations, whose statistics are
frozen, go with the channels. A bottleneck's middle convolution reads all channels of the first, which are gathered: a
quarter of the block's width. A shortcut's convolution is computed whole by every member.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from torch import nn

from spantrain.models.tensor.rules import ELEMENTWISE, Column, Region, child

__all__ = ["image_regions"]


def image_regions(unit: nn.Module) -> Iterator[Region]:
    """Yield the regions of a unit that are made of convolutions."""
    for anchor, module in unit.named_modules():
        finder = _FINDERS.get(type(module).__name__)
        region = finder(anchor, module) if finder is not None else None
        pairs = _pairs(anchor, module) if type(module) is nn.Sequential else [region] if region is not None else []
        yield from (found for found in pairs if _all_there(unit, found))


def _pairs(anchor: str, module: nn.Module) -> Iterator[Region]:
    """Yield pairs of convolutions with batch normalizations and elementwise modules between them."""
    first, channels = "", list[str]()
    prefix = f"{anchor}." if anchor else ""
    for name, part in module.named_children():
        if isinstance(part, nn.BatchNorm2d) and first:
            channels.append(f"{prefix}{name}")
        elif type(part) is nn.Conv2d and part.groups == 1:
            if first:
                column, rows = Column(path=f"{prefix}{first}"), (f"{prefix}{name}",)
                pieces = part.in_channels
                yield Region(anchor=anchor, pieces=pieces, columns=(column,), rows=rows, channels=tuple(channels))
            first, channels = "" if first else name, []
        elif not isinstance(part, ELEMENTWISE):
            first = ""


def _basic(anchor: str, module: nn.Module) -> Region | None:
    first = child(module, "layer.0.convolution")
    if not isinstance(first, nn.Conv2d):
        return None
    return Region(
        anchor=anchor,
        pieces=first.out_channels,
        columns=(Column(path=f"{anchor}.layer.0.convolution"),),
        rows=(f"{anchor}.layer.1.convolution",),
        channels=(f"{anchor}.layer.0.normalization",),
    )


def _bottleneck(anchor: str, module: nn.Module) -> Region | None:
    first = child(module, "layer.0.convolution")
    if not isinstance(first, nn.Conv2d):
        return None
    return Region(
        anchor=anchor,
        pieces=first.out_channels,
        columns=(
            Column(path=f"{anchor}.layer.0.convolution"),
            Column(path=f"{anchor}.layer.1.convolution", gathers=True),
        ),
        rows=(f"{anchor}.layer.2.convolution",),
        channels=(f"{anchor}.layer.0.normalization", f"{anchor}.layer.1.normalization"),
    )


def _inverted(anchor: str, module: nn.Module) -> Region | None:
    depthwise = child(module, "depthwise_conv.depthwise_conv")
    if not isinstance(depthwise, nn.Conv2d):
        return None
    expands = child(module, "expansion.expand_conv") is not None
    depthwise_path = f"{anchor}.depthwise_conv.depthwise_conv"
    columns = [Column(path=f"{anchor}.squeeze_excite.expand")]
    channels = [f"{anchor}.depthwise_conv.depthwise_norm"]
    if expands:
        columns.append(Column(path=f"{anchor}.expansion.expand_conv"))
        channels += [f"{anchor}.expansion.expand_bn", depthwise_path]
    return Region(
        anchor=anchor,
        pieces=depthwise.out_channels,
        columns=tuple(columns),
        rows=(f"{anchor}.squeeze_excite.reduce", f"{anchor}.projection.project_conv"),
        channels=tuple(channels),
        sliced=() if expands else (depthwise_path,),
    )


def _top(anchor: str, module: nn.Module) -> Region | None:
    convolution = child(module, "top_conv")
    if not isinstance(convolution, nn.Conv2d):
        return None
    prefix = f"{anchor}." if anchor else ""
    return Region(
        anchor=anchor,
        pieces=convolution.out_channels,
        columns=(Column(path=f"{prefix}top_conv"),),
        rows=(f"{prefix}classifier",),
        channels=(f"{prefix}top_bn",),
    )


_FINDERS: Mapping[str, Callable[[str, nn.Module], Region | None]] = MappingProxyType(
    {
        "EfficientNetBlock": _inverted,
        "EfficientNetHead": _top,
        "ResNetBasicLayer": _basic,
        "ResNetBottleNeckLayer": _bottleneck,
    }
)


def _all_there(unit: nn.Module, region: Region) -> bool:
    """Whether every module is there, and convolutions have zeros around them: a border of another kind has no rule."""
    modules = [child(unit, path) for path in region.paths]
    convolutions = [module for module in modules if isinstance(module, nn.Conv2d)]
    return None not in modules and all(module.padding_mode == "zeros" for module in convolutions)
