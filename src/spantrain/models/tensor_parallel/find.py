"""Finds what of a unit is divided, by names, by structure, or by a plan that the model itself carries.

A plan is a mapping from layers to words, `base_model_tp_plan` of a configuration or `_tp_plan` of a module; a star
stands for a number in a layer's name. What the words say of whole heads and of equal parts is not taken over: a region
is divided in whole pieces, by shares. `colwise` and `packed_colwise` are column-wise, `rowwise` is row-wise,
`replicated_with_grad_allreduce` is held whole and used on own pieces. Layers with another word are left to our rules.

Of images, ResNet's residual blocks, EfficientNet's blocks and its top, and pairs in an `nn.Sequential` are regions.
Convolutions are divided by output channels, the next by input channels; batch normalizations, whose statistics are
frozen, go with the channels. A bottleneck's middle convolution reads all channels of the first, which are gathered: a
quarter of the block's width. A shortcut's convolution is computed whole by every member.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import MappingProxyType

from torch import nn

from spantrain.models.tensor_parallel import modules, rules
from spantrain.models.tensor_parallel.division import ModuleRule
from spantrain.models.tensor_parallel.rules import ELEMENTWISE, Column, Region, below, child
from spantrain.models.units import UnitModule, parameter_names

_BLOCKS: Mapping[str, int] = {"colwise": 1, "packed_colwise": 2}
_ROW = "rowwise"
_PARTIAL = "replicated_with_grad_allreduce"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def word_regions(unit: nn.Module, full_names: Mapping[str, str]) -> Iterator[Region]:
    """Yield the regions that a model's own plan describes.

    Args:
        unit: a unit, or any module.
        full_names: of each module in it, by path, in the unsplit model.
    """
    words = _words(unit, full_names)
    for parent in sorted({path.rpartition(".")[0] for path in words}):
        own = {path: word for path, word in words.items() if path.rpartition(".")[0] == parent}
        region = _region(unit, parent, own)
        if region is not None:
            yield region


def _words(unit: nn.Module, full_names: Mapping[str, str]) -> dict[str, str]:
    """Return the word of each module that a plan names."""
    found: dict[str, str] = {}
    plans = (getattr(getattr(module, "config", None), "base_model_tp_plan", None) for module in unit.modules())
    for configured in {id(plan): plan for plan in plans if isinstance(plan, Mapping)}.values():
        for path, full in full_names.items():
            starred = _NUMBER.sub("*", full)
            for pattern, word in configured.items():
                if starred == pattern or starred.endswith(f".{pattern}"):
                    found[path] = word
    for anchor, module in unit.named_modules():
        plan = getattr(module, "_tp_plan", None)
        if isinstance(plan, Mapping):
            for name, _ in module.named_modules():
                starred = _NUMBER.sub("*", name)
                if starred in plan:
                    found[below(anchor, name)] = str(plan[starred])
    return {path: word for path, word in found.items() if child(unit, path) is not None}


def _region(unit: nn.Module, parent: str, words: Mapping[str, str]) -> Region | None:
    columns = [Column(path=path, blocks=_BLOCKS[word]) for path, word in words.items() if word in _BLOCKS]
    rows = [path for path, word in words.items() if word == _ROW]
    partial = [path for path, word in words.items() if word == _PARTIAL]
    if not columns or not rows or len(columns) + len(rows) + len(partial) != len(words):
        return None
    if isinstance(getattr(unit.get_submodule(parent), "head_dim", None), int):
        return rules.attention_region(unit, parent, columns, rows, heads_at=parent, partial=partial)
    return rules.plain_region(unit, parent, columns, rows, partial=partial)


_MODULE_RULES = (modules.vocabulary_rule, modules.output_rule, modules.attention_rule, modules.expert_rule)
"""What divides one module by itself; no module is known to two."""


def find_rules(unit: UnitModule) -> tuple[Region | ModuleRule, ...]:
    """Return what of a unit can be divided, whatever the shares."""
    full = full_module_names(unit)
    regions: list[Region] = []
    taken: set[str] = set()
    finders = (
        rules.named_regions(unit),
        image_regions(unit),
        rules.sequential_regions(unit),
        modules.torch_layer_regions(unit),
    )
    for region in chain(word_regions(unit, full), *finders):
        if taken.isdisjoint(region.paths):
            taken.update(region.paths)
            regions.append(region)
    free = [(path, full[path], module) for path, module in unit.named_modules() if path in full and path not in taken]
    # By kind, then in the order of modules.
    alone = [found for rule in _MODULE_RULES for each in free if (found := rule(unit, *each)) is not None]
    return (*regions, *alone)


def full_module_names(unit: UnitModule) -> Mapping[str, str]:
    """Return local path -> name in the unsplit model, for each module that has a parameter in it."""
    found: dict[str, str] = {}
    for local, full in parameter_names(unit).items():
        path, rest = local, full
        while "." in path and "." in rest and path.rpartition(".")[2] == rest.rpartition(".")[2]:
            path, rest = path.rpartition(".")[0], rest.rpartition(".")[0]
            found.setdefault(path, rest)
    return found


def heavy_modules(unit: nn.Module, full_names: Mapping[str, str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that work with matrices of their own, embeddings aside: products, convolutions, experts."""
    for path, module in unit.named_modules():
        if full_names.get(path, "").endswith(modules.POSITION_BIAS):
            continue
        matrices = any(parameter.dim() > 1 and parameter.shape[0] > 1 for parameter in module.parameters(recurse=False))
        if matrices and not isinstance(module, nn.Embedding):
            yield path, module


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
