"""Sequence parallelism: between its divided layers, a member holds and normalizes a slice of the sequence only.

After Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022, section 4.2.2). Kept:
what a row-wise layer gives is summed and cut into slices in one exchange, what a column-wise layer reads is gathered,
and backward each is the other, so that the bytes sent are those of the sums in their place. Not kept: slices are of any
length, by the members' shares, down to none; and what was gathered stays held for the gradient of the weights, so that
W still has no operations of the group.

It is done in transformer blocks: modules of the transformers library of which all parameters are known, those of
attention and of feed-forward networks that are divided, and normalizations outside of them, each on one token alone.
Before or behind the others is one for them: pre-norm, post-norm and parallel blocks have the same rule.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spantrain.core.records import Record
from spantrain.core.span import apportion
from spantrain.models.tensor_parallel.divided import DividedTensor
from spantrain.models.tensor_parallel.group import (
    InputCopy,
    TensorGroup,
    gather_both,
    gather_parts,
    scatter_parts,
    scatter_same,
)
from spantrain.models.tensor_parallel.rules import Region, child, is_library_module

_HIDDEN = "hidden_states"
_TOKENS = 1
"""The dimension of tokens: `(samples, tokens, width)`."""


class DividedSequence(DividedTensor):
    """`(samples, tokens, width)`, of which each member has some tokens: what goes from block to block."""

    @classmethod
    def _on_own(cls, func: Any, args: tuple[Any, ...], named: Any) -> Any:
        moved = getattr(func, "__name__", "") == "movedim" and not named and isinstance(args[0], cls)
        return args[0] if moved and args[1:] == (0, 0) else None


class SequenceSlices:
    """The slices of one unit's blocks, while they run."""

    def __init__(self, group: TensorGroup, shares: Sequence[float], copy: InputCopy) -> None:
        self._group = group
        self._copy = copy
        self._shares = tuple(shares)
        self._sizes: tuple[int, ...] = ()
        self._samples = 0
        self._heads_input: tuple[Tensor, Tensor] | None = None
        """What attention is handed, and what its layers take in the place of it."""
        self._tokens_input: tuple[Tensor, Tensor] | None = None
        """What came to a column-wise layer last, and all members' of it."""

    def attach(self, block: nn.Module, attentions: Sequence[nn.Module]) -> None:
        """Watch what goes in and what comes out of a block, and hand its attention the whole sequence."""
        block.register_forward_pre_hook(self._enter, with_kwargs=True)
        block.register_forward_hook(self._leave)
        for attention in attentions:
            # Before others that look at what comes in.
            attention.register_forward_pre_hook(self._enter_attention, with_kwargs=True, prepend=True)

    def forget(self) -> None:
        """Let go of all tensors: a unit's pass is over."""
        self._heads_input = self._tokens_input = None

    def for_heads(self, tensor: Tensor) -> Tensor:
        """Return the whole sequence for one member's heads; of what attention was not handed, the copy."""
        if self._heads_input is not None and tensor is self._heads_input[0]:
            return self._heads_input[1]
        return self._copy(tensor)

    def for_columns(self, tensor: Tensor) -> Tensor:
        """Return all tokens for some columns of a layer that works on each token alone."""
        if self._tokens_input is None or self._tokens_input[0] is not tensor:
            sent = _computed(tensor)
            self._tokens_input = tensor, gather_parts(sent, self._group, self._lengths(sent), tensor.dim() - 2)
        return self._tokens_input[1]

    def own_tokens(self, tensor: Tensor) -> Tensor:
        """Return the own tokens of the members' sum, behind the layers that `for_columns` was for."""
        return scatter_parts(tensor, self._group, self._lengths(tensor), tensor.dim() - 2)

    def own_of_heads(self, tensor: Tensor) -> Tensor:
        """Return the own tokens of the members' sum, behind attention over the whole sequence."""
        tokens = sum(self._sizes)
        own = scatter_parts(tensor.reshape(-1, tokens, tensor.shape[-1]), self._group, self._sizes, _TOKENS)
        return own if tensor.dim() > 2 else own.flatten(0, 1)

    def _enter(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Hand a block its slice: the one that the block before left, or one of what all members have."""
        hidden = args[0] if args else kwargs[_HIDDEN]
        if hidden.dim() != 3:
            raise ValueError(
                f"sequence-parallel {type(block).__name__}: hidden states of shape {tuple(hidden.shape)}, wanted "
                "(samples, tokens, width); plan the stage without sequence_parallel"
            )
        self._samples = hidden.shape[0]
        if isinstance(hidden, DividedSequence):
            self._sizes, own = hidden.sizes, hidden.own
        else:
            self._sizes = tuple(apportion(hidden.shape[_TOKENS], self._shares))
            own = scatter_same(hidden, self._group, self._sizes, _TOKENS)
        return _replaced(own, args, kwargs)

    def _leave(self, _: nn.Module, __: Any, result: Any) -> Any:
        """Have what goes on behave as the whole sequence."""
        if isinstance(result, tuple):
            return (self._wrapped(result[0]), *result[1:])
        return self._wrapped(result)

    def _wrapped(self, own: Tensor) -> DividedSequence:
        return DividedSequence(own, sizes=self._sizes, dim=_TOKENS, group=self._group)

    def _enter_attention(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Hand attention the whole sequence.

        Its layers take another tensor with the same numbers, whose gradient comes in parts. Should they be handed
        something that was made of the first one, that is summed over the group as without slices.
        """
        sent = _computed(args[0] if args else kwargs[_HIDDEN])
        parts, same = gather_both(sent, self._group, self._sizes, _TOKENS)
        self._heads_input = same, parts
        return _replaced(same, args, kwargs)

    def _lengths(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the members' lengths in the last dimension but one, of tokens or of all samples' tokens."""
        each = self._samples if tensor.dim() == 2 else 1
        return tuple(each * size for size in self._sizes)


def _replaced(hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, _HIDDEN: hidden})


def _computed(tensor: Tensor) -> Tensor:
    """Return a tensor in the type that layers compute in: it is what travels."""
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor


_CALLED = ("Block", "Layer")
"""How the library's names of block classes end."""


class SequenceBlock(Record):
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


def sequence_blocks(unit: nn.Module, regions: Sequence[Region]) -> tuple[SequenceBlock, ...]:
    """Return the blocks of a unit that can work on slices, given the regions that are divided in it."""
    found: list[SequenceBlock] = []
    for path, module in unit.named_modules():
        if any(_is_below(path, block.path) for block in found):
            continue
        block = _block(path, module, [region for region in regions if _is_below(region.anchor, path)])
        if block is not None:
            found.append(block)
    return tuple(found)


def _block(path: str, module: nn.Module, regions: Sequence[Region]) -> SequenceBlock | None:
    attentions = tuple(dict.fromkeys(region.counts_at for region in regions if region.counts_at is not None))
    named = is_library_module(module) and type(module).__name__.endswith(_CALLED)
    if not named or not attentions or not _takes_hidden(module):
        return None
    if not all(_takes_hidden(child(module, _inside(at, path))) for at in attentions):
        return None
    divided = {name for region in regions for name in region.paths}
    inner = module.named_modules(prefix=path)
    having = [name for name, part in inner if next(part.parameters(recurse=False), None) is not None]
    others = [name for name in having if name not in divided]
    norms = [name for name in others if _is_norm(child(module, _inside(name, path)))]
    inside = [name for name in others if any(_is_below(name, at) for at in attentions)]
    # A bias of positions is the attention's own affair; a normalization there could be on either side of its layers.
    if any(not isinstance(child(module, _inside(name, path)), nn.Embedding) for name in inside):
        return None
    if set(others) != {*norms, *inside}:
        return None
    return SequenceBlock(path=path, attentions=attentions, regions=tuple(regions), norms=tuple(norms))


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
