"""The words of transformers' tensor-parallel plans, for models that carry one.

A plan is a mapping from layers to words, `base_model_tp_plan` of a configuration or `_tp_plan` of a module; a star
stands for a number in a layer's name. What the words say of whole heads and of equal parts is not taken over: a region
is divided in whole pieces, by shares. `colwise` and `packed_colwise` are column-wise, `rowwise` is row-wise,
`replicated_with_grad_allreduce` is held whole and used on own pieces. Layers with another word are left to our rules.
"""

import re
from collections.abc import Iterator, Mapping

from torch import nn

from spantrain.models.tensor_parallel.rules import Column, Region, attention_region, child, plain_region

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
    parents = sorted({path.rpartition(".")[0] for path in words})
    for parent in parents:
        region = _region(unit, parent, {path: word for path, word in words.items() if _parent(path) == parent})
        if region is not None:
            yield region


def _words(unit: nn.Module, full_names: Mapping[str, str]) -> dict[str, str]:
    """Return the word of each module that a plan names."""
    found: dict[str, str] = {}
    for configured in _configured(unit):
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
                    found[_join(anchor, name)] = str(plan[starred])
    return {path: word for path, word in found.items() if child(unit, path) is not None}


def _configured(unit: nn.Module) -> Iterator[Mapping[str, str]]:
    seen: set[int] = set()
    for module in unit.modules():
        plan = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
        if isinstance(plan, Mapping) and id(plan) not in seen:
            seen.add(id(plan))
            yield plan


def _region(unit: nn.Module, parent: str, words: Mapping[str, str]) -> Region | None:
    columns = [Column(path=path, blocks=_BLOCKS[word]) for path, word in words.items() if word in _BLOCKS]
    rows = [path for path, word in words.items() if word == _ROW]
    partial = [path for path, word in words.items() if word == _PARTIAL]
    if not columns or not rows or len(columns) + len(rows) + len(partial) != len(words):
        return None
    anchor = child(unit, parent)
    assert anchor is not None, parent
    if isinstance(getattr(anchor, "head_dim", None), int):
        return attention_region(unit, parent, columns, rows, heads_at=parent, partial=partial)
    return plain_region(unit, parent, columns, rows, partial=partial)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _join(anchor: str, name: str) -> str:
    return f"{anchor}.{name}" if anchor and name else anchor or name
