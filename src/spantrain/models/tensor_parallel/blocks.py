"""Transformer blocks whose residuals and normalizations can be held as slices of the sequence.

A block is a module of the transformers library of which all parameters are known: those of attention and of
feed-forward networks that are divided, and normalizations outside of them, each on one token alone. Before or behind
the others is one for them: pre-norm, post-norm and parallel blocks have the same rule.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from spantrain.models.tensor_parallel.rules import Region, child, is_library_module

_CALLED = ("Block", "Layer")
"""How the library's names of block classes end."""
_HIDDEN = "hidden_states"


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block of a unit."""

    path: str
    attentions: tuple[str, ...]
    """Paths of the modules that need the whole sequence."""
    regions: tuple[Region, ...]
    norms: tuple[str, ...]
    """Paths of the normalizations that work on the own slice."""

    @property
    def partial(self) -> tuple[tuple[str, str], ...]:
        """Module and name of the parameters that are held whole and work on the own slice, where they are there."""
        rows = ((path, "bias") for region in self.regions for path in region.rows)
        return (*rows, *((path, name) for path in self.norms for name in ("weight", "bias")))


def sequence_blocks(unit: nn.Module, regions: Sequence[Region]) -> tuple[Block, ...]:
    """Return the blocks of a unit that can work on slices, given the regions that are divided in it."""
    found: list[Block] = []
    for path, module in unit.named_modules():
        if any(_is_below(path, block.path) for block in found):
            continue
        block = _block(path, module, [region for region in regions if _is_below(region.anchor, path)])
        if block is not None:
            found.append(block)
    return tuple(found)


def _block(path: str, module: nn.Module, regions: Sequence[Region]) -> Block | None:
    attentions = tuple(dict.fromkeys(region.counts_at for region in regions if region.counts_at is not None))
    named = is_library_module(module) and type(module).__name__.endswith(_CALLED)
    if not named or not attentions or not _takes_hidden(module):
        return None
    if not all(_takes_hidden(child(module, _inside(at, path))) for at in attentions):
        return None
    divided = {name for region in regions for name in region.paths}
    others = [name for name in _with_parameters(path, module) if name not in divided]
    norms = [name for name in others if _is_norm(child(module, _inside(name, path)))]
    inside = [name for name in others if any(_is_below(name, at) for at in attentions)]
    # A bias of positions is the attention's own affair; a normalization there could be on either side of its layers.
    if any(not isinstance(child(module, _inside(name, path)), nn.Embedding) for name in inside):
        return None
    if set(others) != {*norms, *inside}:
        return None
    return Block(path=path, attentions=attentions, regions=tuple(regions), norms=tuple(norms))


def _with_parameters(path: str, module: nn.Module) -> Iterator[str]:
    for name, part in module.named_modules(prefix=path):
        if next(part.parameters(recurse=False), None) is not None:
            yield name


def _is_norm(module: nn.Module | None) -> bool:
    """Whether a module scales each token by itself."""
    if module is None or not type(module).__name__.endswith("Norm") or next(module.buffers(), None) is not None:
        return False
    names = {name for name, _ in module.named_parameters()}
    return names <= {"bias", "weight"} and all(parameter.dim() == 1 for parameter in module.parameters())


def _takes_hidden(module: nn.Module | None) -> bool:
    """Whether a module's first argument is what goes from block to block."""
    return module is not None and next(iter(inspect.signature(module.forward).parameters), "") == _HIDDEN


def _is_below(path: str, above: str) -> bool:
    return path == above or not above or path.startswith(f"{above}.")


def _inside(path: str, above: str) -> str:
    return path.removeprefix(above).removeprefix(".")
