"""Finds what of a unit is divided, by names, by structure, or by a plan that the model itself carries.

A plan is a mapping from layers to words, `base_model_tp_plan` of a configuration or `_tp_plan` of a module; a star
stands for a number in a layer's name. What the words say of whole heads and of equal parts is not taken over: a region
is divided in whole pieces, by shares. `colwise` and `packed_colwise` are column-wise, `rowwise` is row-wise,
`replicated_with_grad_allreduce` is held whole and used on own pieces. Layers with another word are left to our rules.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import chain

from torch import nn

from spantrain.models.tensor_parallel import rules
from spantrain.models.tensor_parallel.division import ModuleRule
from spantrain.models.tensor_parallel.experts import expert_rule
from spantrain.models.tensor_parallel.images import image_regions
from spantrain.models.tensor_parallel.multihead import attention_rule, torch_layer_regions
from spantrain.models.tensor_parallel.vocabulary import POSITION_BIAS, output_rule, vocabulary_rule
from spantrain.models.units import UnitModule, parameter_names

_BLOCKS: Mapping[str, int] = {"colwise": 1, "packed_colwise": 2}
_ROW = "rowwise"
_PARTIAL = "replicated_with_grad_allreduce"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def word_regions(unit: nn.Module, full_names: Mapping[str, str]) -> Iterator[rules.Region]:
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
                    found[rules.below(anchor, name)] = str(plan[starred])
    return {path: word for path, word in found.items() if rules.child(unit, path) is not None}


def _region(unit: nn.Module, parent: str, words: Mapping[str, str]) -> rules.Region | None:
    columns = [rules.Column(path=path, blocks=_BLOCKS[word]) for path, word in words.items() if word in _BLOCKS]
    rows = [path for path, word in words.items() if word == _ROW]
    partial = [path for path, word in words.items() if word == _PARTIAL]
    if not columns or not rows or len(columns) + len(rows) + len(partial) != len(words):
        return None
    if isinstance(getattr(unit.get_submodule(parent), "head_dim", None), int):
        return rules.attention_region(unit, parent, columns, rows, heads_at=parent, partial=partial)
    return rules.plain_region(unit, parent, columns, rows, partial=partial)


_MODULE_RULES = (vocabulary_rule, output_rule, attention_rule, expert_rule)
"""What divides one module by itself; the no module is known to two."""


def find_rules(unit: UnitModule) -> tuple[rules.Region | ModuleRule, ...]:
    """Return what of a unit can be divided, whatever the shares."""
    full = full_module_names(unit)
    regions: list[rules.Region] = []
    taken: set[str] = set()
    finders = (
        rules.named_regions(unit),
        image_regions(unit),
        rules.sequential_regions(unit),
        torch_layer_regions(unit),
    )
    for region in chain(word_regions(unit, full), *finders):
        if taken.isdisjoint(region.paths):
            taken.update(region.paths)
            regions.append(region)
    free = [(path, full[path], module) for path, module in unit.named_modules() if path in full and path not in taken]
    # By kind, then in the order of modules.
    modules = [found for rule in _MODULE_RULES for each in free if (found := rule(unit, *each)) is not None]
    return (*regions, *modules)


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
        if full_names.get(path, "").endswith(POSITION_BIAS):
            continue
        matrices = any(parameter.dim() > 1 and parameter.shape[0] > 1 for parameter in module.parameters(recurse=False))
        if matrices and not isinstance(module, nn.Embedding):
            yield path, module
