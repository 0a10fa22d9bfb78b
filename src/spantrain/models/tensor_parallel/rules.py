"""Which modules of a unit are divided together, and into how many pieces: what is known of a module's inside.

A region is what Megatron-LM (Shoeybi et al., 2019, section 3) divides as one: column-wise layers, what works on each
of their outputs (or heads) alone, and the row-wise layers behind. A region is found

- in the words of transformers' tensor-parallel plans, if the model carries one (`find`);
- by the names that the transformers library gives to the layers of attention and of feed-forward networks;
- by structure, where a module's way is known: chains in `nn.Sequential`, residual blocks of convolutions (`find`).

Of attention, whole groups of queries with their key and value head are the pieces. Nothing is divided of which it is
not known what happens between its layers.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from spantrain.core.records import Record

_HEAD_LENGTH = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
_POSITIONED = ("MT5Attention", "T5Attention")
"""Attention to which learned relative positions come from its first layer (`division`)."""
_COUNTS_OF_ALL = (
    "self.embed_dim", "self.hidden_size", "self.d_model", "config.hidden_size", "config.num_attention_heads",
    "config.num_key_value_heads",
)  # fmt: skip
"""Words in a forward that cannot know how many heads a member has."""
ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Hardswish,
    nn.Hardsigmoid, nn.Identity, nn.Dropout,
)  # fmt: skip
"""What works on each number of a tensor alone."""


class Column(Record):
    """A layer divided by its outputs."""

    path: str
    blocks: int = 1
    """Layers fused behind each other in it, each divided: 3 of queries, keys and values."""
    gathers: bool = False
    """Its input is divided and must be put together first."""


class Region(Record):
    """Modules of a unit that are divided together."""

    anchor: str
    """Path of the module that has them."""
    pieces: int
    columns: tuple[Column, ...]
    rows: tuple[str, ...]
    channels: tuple[str, ...] = ()
    """Batch normalizations and depthwise convolutions on what is divided."""
    sliced: tuple[str, ...] = ()
    """Depthwise convolutions on a whole input, of which they take the own channels."""
    partial: tuple[str, ...] = ()
    """Modules held whole and used on own pieces: the gradients of their parameters are sums over the group."""
    counts_at: str | None = None
    """Path of the module whose counts of heads and widths become the own ones."""
    heads_of_bias: bool = False
    """That module is handed a bias of all heads' positions, of which it takes the own ones."""
    output_sums: int = 1
    """Sums of the size of the unit's output in a forward pass."""

    @property
    def paths(self) -> tuple[str, ...]:
        """All modules that change or are counted in it."""
        return (*(column.path for column in self.columns), *self.rows, *self.channels, *self.sliced, *self.partial)


class Pattern(Record):
    """Layers by the names that they have below one module."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    blocks: int = 1
    heads_at: str | None = None
    """Module below that knows the length of an attention's head; "" is the module itself."""
    fused_heads: bool = False
    """The outputs of one fused layer are heads, each of a query, a key and a value."""
    only_in: tuple[str, ...] = ()
    """Names of the classes that it is known of; empty: of all."""


PATTERNS: tuple[Pattern, ...] = (
    Pattern(columns=("q_proj", "k_proj", "v_proj"), rows=("o_proj",), heads_at=""),
    Pattern(columns=("q_proj", "k_proj", "v_proj"), rows=("out_proj",), heads_at=""),
    Pattern(
        columns=("attention.self.query", "attention.self.key", "attention.self.value"),
        rows=("attention.output.dense",),
        heads_at="attention.self",
    ),
    Pattern(
        columns=("attention.attention.query", "attention.attention.key", "attention.attention.value"),
        rows=("attention.output.dense",),
        heads_at="attention.attention",
    ),
    Pattern(columns=("c_attn",), rows=("c_proj",), blocks=3, heads_at=""),
    Pattern(
        columns=("query_key_value",), rows=("dense",), heads_at="", fused_heads=True, only_in=("GPTNeoXAttention",)
    ),
    Pattern(columns=("q", "k", "v"), rows=("o",), heads_at="", only_in=_POSITIONED),
    Pattern(columns=("gate_proj", "up_proj"), rows=("down_proj",)),
    Pattern(columns=("gate_up_proj",), rows=("down_proj",), blocks=2),
    Pattern(columns=("up_proj",), rows=("down_proj",)),
    Pattern(columns=("c_fc",), rows=("c_proj",)),
    Pattern(columns=("fc1",), rows=("fc2",)),
    Pattern(columns=("w1", "w3"), rows=("w2",)),
    Pattern(columns=("wi_0", "wi_1"), rows=("wo",)),
    Pattern(columns=("wi",), rows=("wo",)),
    Pattern(columns=("lin1",), rows=("lin2",)),
    Pattern(columns=("dense_h_to_4h",), rows=("dense_4h_to_h",)),
    Pattern(columns=("intermediate.dense",), rows=("output.dense",)),
)
"""Patterns of the transformers library's models; the first that fits is taken."""


def child(module: nn.Module, path: str) -> nn.Module | None:
    """Return the module at a path below another, or None."""
    for name in path.split(".") if path else ():
        found = module._modules.get(name)
        if found is None:
            return None
        module = found
    return module


def linear_sizes(module: nn.Module | None) -> tuple[int, int] | None:
    """Return the numbers of inputs and outputs of a linear layer (transformers' Conv1D too); None of anything else."""
    if type(module) is nn.Linear:
        return module.in_features, module.out_features
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Conv1D" and isinstance(weight, Tensor) and weight.dim() == 2:
        return weight.shape[0], weight.shape[1]
    return None


def is_library_module(module: nn.Module) -> bool:
    """Whether a module is the transformers library's, whose names have known meanings."""
    return type(module).__module__.startswith("transformers.")


def named_regions(unit: nn.Module) -> Iterator[Region]:
    """Yield the regions of a unit whose layers have the names of `PATTERNS`."""
    for anchor, module in unit.named_modules():
        if not is_library_module(module):
            continue
        taken: set[str] = set()
        for pattern in PATTERNS:
            found = _matched(unit, anchor, module, pattern)
            if found is not None and taken.isdisjoint(found.paths):
                taken.update(found.paths)
                yield found


def _matched(unit: nn.Module, anchor: str, module: nn.Module, pattern: Pattern) -> Region | None:
    if pattern.only_in and type(module).__name__ not in pattern.only_in:
        return None
    if any(child(module, path) is None for path in (*pattern.columns, *pattern.rows)):
        return None
    columns = [Column(path=below(anchor, path), blocks=pattern.blocks) for path in pattern.columns]
    rows = [below(anchor, path) for path in pattern.rows]
    if pattern.heads_at is not None:
        heads_at = below(anchor, pattern.heads_at)
        return attention_region(unit, anchor, columns, rows, heads_at=heads_at, fused=3 if pattern.fused_heads else 1)
    return plain_region(unit, anchor, columns, rows)


def attention_region(
    unit: nn.Module,
    anchor: str,
    columns: Sequence[Column],
    rows: Sequence[str],
    *,
    heads_at: str,
    partial: Sequence[str] = (),
    fused: int = 1,
) -> Region | None:
    """Return attention as a region; None where its heads cannot be told from its layers.

    The layer with the fewest outputs, keys or values, has as many pieces as there are key and value heads. A head of
    it is `fused` times as long as the head that comes out, where it holds queries, keys and values.
    """
    knows = child(unit, heads_at)
    length = next((value for name in _HEAD_LENGTH if isinstance(value := getattr(knows, name, None), int)), 0)
    if knows is None or length < 1 or _works_on_all_heads(knows):
        return None
    outs = [_sizes(unit, column.path)[1] // column.blocks for column in columns]
    heads, rest = divmod(min(outs), fused * length)
    if any(_sizes(unit, path)[0] * fused != max(outs) for path in rows):
        return None
    region = Region(
        anchor=anchor,
        pieces=heads,
        columns=tuple(columns),
        rows=tuple(rows),
        partial=tuple(partial),
        counts_at=heads_at,
        heads_of_bias=type(knows).__name__ in _POSITIONED,
        output_sums=len(rows),
    )
    return region if rest == 0 and _divides(unit, region) else None


def _works_on_all_heads(attention: nn.Module) -> bool:
    """Whether attention has parameters of its own for each head, or a way that counts all heads of the model."""
    if type(attention).__name__ in _POSITIONED:
        return False
    if hasattr(attention, "has_relative_attention_bias") or any(True for _ in attention.parameters(recurse=False)):
        return True
    try:
        source = inspect.getsource(type(attention).forward)
    except (OSError, TypeError):
        return False
    return any(words in source for words in _COUNTS_OF_ALL)


def plain_region(
    unit: nn.Module, anchor: str, columns: Sequence[Column], rows: Sequence[str], *, partial: Sequence[str] = ()
) -> Region | None:
    """Return layers with nothing but elementwise work between them as a region; None where their sizes do not fit."""
    first = linear_sizes(child(unit, columns[0].path))
    if first is None:
        return None
    width = first[1] // columns[0].blocks
    region = Region(
        anchor=anchor,
        pieces=width,
        columns=tuple(columns),
        rows=tuple(rows),
        partial=tuple(partial),
        output_sums=len(rows),
    )
    agree = all(_sizes(unit, column.path)[1] == width * column.blocks for column in columns)
    return region if agree and _divides(unit, region) and not _normalizes(unit, region, first[0], width) else None


def _sizes(unit: nn.Module, path: str) -> tuple[int, int]:
    return linear_sizes(child(unit, path)) or (0, 0)


def _divides(unit: nn.Module, region: Region) -> bool:
    """Whether all sizes are whole multiples of the pieces."""
    if region.pieces < 1:
        return False
    outs = [(_sizes(unit, column.path)[1], column.blocks * region.pieces) for column in region.columns]
    ins = [(_sizes(unit, path)[0], region.pieces) for path in region.rows]
    return all(size > 0 and size % pieces == 0 for size, pieces in (*outs, *ins))


def _normalizes(unit: nn.Module, region: Region, outside: int, inside: int) -> bool:
    """Whether something else has a parameter as long as what would be divided: a normalization between the layers."""
    anchor = child(unit, region.anchor)
    if anchor is None or outside == inside:
        return False
    layers = {id(child(unit, path)) for path in region.paths}
    others = (module for module in anchor.children() if id(module) not in layers)
    return any(
        tuple(parameter.shape) == (inside,) for module in others for parameter in module.parameters(recurse=False)
    )


def sequential_regions(unit: nn.Module) -> Iterator[Region]:
    """Yield pairs of linear layers in an `nn.Sequential` with elementwise modules between them."""
    for anchor, module in unit.named_modules():
        if type(module) is not nn.Sequential:
            continue
        waiting: str | None = None
        for name, part in module.named_children():
            if linear_sizes(part) is None:
                waiting = waiting if isinstance(part, ELEMENTWISE) else None
            elif waiting is None:
                waiting = below(anchor, name)
            else:
                found = plain_region(unit, anchor, [Column(path=waiting)], [below(anchor, name)])
                waiting = None if found is not None else below(anchor, name)
                if found is not None:
                    yield found


def counts(module: nn.Module, pieces: int, own: int) -> Mapping[str, int]:
    """Return what a module's counts of heads, and widths of all of them, become with `own` of its `pieces`."""
    names = (
        "num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "num_kv_heads", "n_kv_heads",
        "split_size", "all_head_size", "inner_dim",
    )  # fmt: skip
    known = {name: value for name in names if isinstance(value := module.__dict__.get(name), int)}
    return {name: value // pieces * own for name, value in known.items() if value % pieces == 0}


def below(anchor: str, path: str) -> str:
    """Return the path of what is at a path below another; either may be empty."""
    return f"{anchor}.{path}" if anchor and path else anchor or path
