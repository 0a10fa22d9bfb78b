"""What of a unit is divided: its regions, its vocabulary, and what is left whole.

The words of transformers' tensor-parallel plans, for models that carry one.

A plan is a mapping from layers to words, `base_model_tp_plan` of a configuration or `_tp_plan` of a module; a star
stands for a number in a layer's name. What the words say of whole heads and of equal parts is not taken over: a region
is divided in whole pieces, by shares. `colwise` and `packed_colwise` are column-wise, `rowwise` is row-wise,
`replicated_with_grad_allreduce` is held whole and used on own pieces. Layers with another word are left to our rules.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from spantrain.models.tensor_parallel.experts import expert_width
from spantrain.models.tensor_parallel.images import image_regions
from spantrain.models.tensor_parallel.multihead import is_divisible_attention, torch_layer_regions
from spantrain.models.tensor_parallel.rules import (
    Column,
    Region,
    attention_region,
    child,
    named_regions,
    plain_region,
    sequential_regions,
)
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


_VOCABULARIES = frozenset({"embed_tokens", "shared", "tok_embeddings", "token_embedding", "word_embeddings", "wte"})
_POSITIONS = "relative_attention_bias"
"""Of distances between tokens: few rows, which units share that make the same bias of them."""
_OUTPUTS = frozenset({"classifier", "decoder", "embed_out", "head", "lm_head", "output_projection", "score"})


@dataclass(frozen=True, kw_only=True)
class UnitRules:
    """Paths of what can be divided in a unit."""

    regions: tuple[Region, ...]
    embeddings: tuple[str, ...]
    """Of vocabularies, divided by rows."""
    outputs: tuple[str, ...]
    """Layers before a loss, divided by classes."""
    attentions: tuple[str, ...]
    """Modules of torch's own attention, divided by heads."""
    experts: tuple[str, ...]
    """Experts of a mixture, divided by their inner width."""

    @property
    def sums(self) -> int:
        """Sums of the size of the unit's output in a forward pass; an output layer's few numbers count as one."""
        return (
            sum(region.output_sums for region in self.regions)
            + len(self.embeddings)
            + len(self.outputs)
            + len(self.attentions)
            + len(self.experts)
        )


def find_rules(unit: UnitModule) -> UnitRules:
    """Return what of a unit can be divided, whatever the shares."""
    regions: list[Region] = []
    taken: set[str] = set()
    for region in _candidates(unit):
        if taken.isdisjoint(region.paths):
            taken.update(region.paths)
            regions.append(region)
    full = full_module_names(unit)
    free = [(path, full[path], module) for path, module in unit.named_modules() if path in full and path not in taken]
    return UnitRules(
        regions=tuple(regions),
        embeddings=tuple(path for path, name, module in free if _is_vocabulary(unit, path, name, module)),
        outputs=tuple(path for path, name, module in free if _is_output(unit, path, name, module)),
        attentions=tuple(path for path, _, module in free if is_divisible_attention(module)),
        experts=tuple(path for path, _, module in free if expert_width(module) is not None),
    )


def _candidates(unit: UnitModule) -> Iterator[Region]:
    yield from word_regions(unit, full_module_names(unit))
    yield from named_regions(unit)
    yield from image_regions(unit)
    yield from sequential_regions(unit)
    yield from torch_layer_regions(unit)


def _is_vocabulary(unit: UnitModule, path: str, name: str, module: nn.Module) -> bool:
    plain = type(module) is nn.Embedding and module.max_norm is None and not module.sparse
    if not plain or module.scale_grad_by_freq:
        return False
    last = name.rpartition(".")[2]
    named = last in _VOCABULARIES or (f"{path}.weight" in unit.shared.values() and last != _POSITIONS)
    return named and not _works_with_weight(unit, path)


def _works_with_weight(unit: UnitModule, path: str) -> bool:
    """Whether a module around an embedding takes its weight into its own hands, as for a product with all rows."""
    parents, name = path.split(".")[:-1], path.rpartition(".")[2]
    around = [child(unit, ".".join(parents[:length])) for length in range(1, len(parents) + 1)]
    return any(f"{name}.weight" in _source(module) for module in around if module is not None)


def _source(module: nn.Module) -> str:
    """Return the code of a module's methods but the one that makes it; nothing if there is none to read."""
    found = []
    for name, method in vars(type(module)).items():
        if inspect.isfunction(method) and name != "__init__":
            try:
                found.append(inspect.getsource(method))
            except OSError:
                continue
    return "".join(found)


def _is_output(unit: UnitModule, path: str, name: str, module: nn.Module) -> bool:
    """Whether a layer is the one before the loss, by its name in the unsplit model; `classifier.1` is one too."""
    if type(module) is not nn.Linear:
        return False
    names = {word for word in name.split(".")[-2:] if not word.isdecimal()}
    return bool(names & _OUTPUTS) or f"{path}.weight" in unit.shared.values()


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
        if full_names.get(path, "").endswith(_POSITIONS):
            continue
        matrices = any(parameter.dim() > 1 and parameter.shape[0] > 1 for parameter in module.parameters(recurse=False))
        if matrices and not isinstance(module, nn.Embedding):
            yield path, module
