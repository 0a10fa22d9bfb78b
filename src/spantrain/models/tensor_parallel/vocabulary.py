"""Vocabularies: embeddings, divided by rows, and the layer before the loss, divided by classes."""

import inspect
from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.nn import functional

from spantrain.core.span import Span
from spantrain.models.tensor_parallel.divided import DividedLogits
from spantrain.models.tensor_parallel.division import Change, ColumnLayer, Divider, ModuleRule, part_of
from spantrain.models.tensor_parallel.group import InputCopy, TensorGroup, sum_parts
from spantrain.models.tensor_parallel.rules import child
from spantrain.models.units import UnitModule
from spantrain.models.weight_gradients import LINEAR

POSITION_BIAS = "relative_attention_bias"
"""An embedding of distances between tokens: few rows, which units share that make the same bias of them."""
_VOCABULARIES = frozenset({"embed_tokens", "shared", "tok_embeddings", "token_embedding", "word_embeddings", "wte"})
_OUTPUTS = frozenset({"classifier", "decoder", "embed_out", "head", "lm_head", "output_projection", "score"})


class OutputLayer(ColumnLayer):
    """The own classes of the layer whose outputs the loss is taken of."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], read: InputCopy, all_classes: Sequence[Span], group: TensorGroup
    ) -> None:
        """`all_classes` are those of each member."""
        super().__init__(parameters, LINEAR, read)
        self._sizes = [span.size for span in all_classes]
        self._group = group

    def forward(self, tensor: Tensor) -> DividedLogits:
        """Return what behaves as all outputs would."""
        return DividedLogits(super().forward(tensor), sizes=self._sizes, dim=-1, group=self._group)


class DividedEmbedding(nn.Module):
    """The own rows of an embedding; rows of others count as zeros in the group's sum."""

    def __init__(self, weight: nn.Parameter, *, rows: Span, group: TensorGroup, padding_row: int | None) -> None:
        super().__init__()
        self.weight = weight
        self._rows = rows
        self._group = group
        own_padding = padding_row is not None and rows.lo <= padding_row < rows.hi
        self._padding = padding_row - rows.lo if padding_row is not None and own_padding else None

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the vectors of all tokens, the same on all members."""
        foreign = (tokens < self._rows.lo) | (tokens >= self._rows.hi)
        own = functional.embedding((tokens - self._rows.lo).masked_fill(foreign, 0), self.weight, self._padding)
        return sum_parts(own.masked_fill(foreign[..., None], 0.0), self._group)

    def extra_repr(self) -> str:
        """Say what is held."""
        return f"rows {self._rows} of the vocabulary"


def vocabulary_rule(unit: UnitModule, path: str, name: str, module: nn.Module) -> ModuleRule | None:
    """Return how an embedding of a vocabulary is divided; None of any other module."""
    if not isinstance(module, nn.Embedding) or not _is_vocabulary(unit, path, name, module):
        return None
    embedding = module

    def changes(by: Divider, rows: Sequence[Span]) -> tuple[Change, ...]:
        own = rows[by.group.rank]

        def build(new: Mapping[str, nn.Parameter]) -> nn.Module:
            return DividedEmbedding(new["weight"], rows=own, group=by.group, padding_row=embedding.padding_idx)

        parts = {"weight": part_of(embedding.weight, 0, own, embedding.num_embeddings)}
        return (Change(path=path, module=embedding, parts=parts, build=build),)

    return ModuleRule(paths=(path,), pieces=embedding.num_embeddings, changes=changes)


def output_rule(unit: UnitModule, path: str, name: str, module: nn.Module) -> ModuleRule | None:
    """Return how the layer before the loss is divided; None of any other module.

    It is told by its name in the unsplit model; `classifier.1` is one too.
    """
    words = {word for word in name.split(".")[-2:] if not word.isdecimal()}
    if type(module) is not nn.Linear or not (words & _OUTPUTS or f"{path}.weight" in unit.shared.values()):
        return None
    classes = module.out_features

    def changes(by: Divider, spans: Sequence[Span]) -> tuple[Change, ...]:
        own = spans[by.group.rank]
        parts = {name: part_of(whole, 0, own, classes) for name, whole in module.named_parameters(recurse=False)}
        return (
            Change(path=path, module=module, parts=parts, build=lambda new: OutputLayer(new, by.copy, spans, by.group)),
        )

    return ModuleRule(paths=(path,), pieces=classes, changes=changes)


def _is_vocabulary(unit: UnitModule, path: str, name: str, module: nn.Embedding) -> bool:
    if type(module) is not nn.Embedding or module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
        return False
    last = name.rpartition(".")[2]
    named = last in _VOCABULARIES or (f"{path}.weight" in unit.shared.values() and last != POSITION_BIAS)
    # A module around an embedding may take its weight into its own hands, as for a product with all rows.
    *parents, own = path.split(".")
    around = [child(unit, ".".join(parents[:length])) for length in range(1, len(parents) + 1)]
    return named and not any(f"{own}.weight" in _source(module) for module in around if module is not None)


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
