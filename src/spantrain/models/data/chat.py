"""Conversations as samples: padded to one length, or packed, several in a sample; only what is learnt has labels."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spantrain.core.records import Record
from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError
from spantrain.models.build import unit_source
from spantrain.models.data.choice import known_tokens
from spantrain.models.data.conversations import conversation_parts
from spantrain.models.data.records import HELD_OUT_EVERY, apart
from spantrain.models.data.rendering import Rendered, Renderer
from spantrain.models.data.text import IntArray
from spantrain.models.units import IGNORED_LABEL

_CAUSAL = ("next-byte", "own")


class _Shape(Record):
    """How rows are given to a model."""

    length: int
    padding: int
    names: tuple[str | None, ...]
    """What the model calls its inputs; None: by position."""
    shifted: bool
    """Whether a label is the token that follows; otherwise the model shifts labels itself."""


class ChatSamples:
    """Rows of tokens of conversations: `models.data.dataset.Dataset`."""

    def __init__(self, kept: Sequence[Rendered], rows: Sequence[Sequence[int]], shape: _Shape, note: str) -> None:
        """Take conversations of at most a row's length, and which of them each row holds."""
        self._tokens = np.concatenate([one.tokens for one in kept])
        self._counted = np.concatenate([one.counted for one in kept])
        self._starts = [0, *accumulate(len(one.tokens) for one in kept)]
        self._rows = rows
        self._shape = shape
        self.note = note
        """What was read, in one line."""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def digest(self) -> str:
        """SHA-256 over all rows."""
        found = sha256(repr((self._rows, self._shape, self._starts)).encode())
        found.update(np.ascontiguousarray(self._tokens).tobytes() + self._counted.tobytes())
        return found.hexdigest()

    def inputs(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return int64 `(samples, tokens)` for each of the model's inputs: tokens, their mask, their positions."""
        makers: dict[str, Callable[[int], IntArray]] = {
            "input_ids": self._row_tokens,
            "attention_mask": lambda index: self._padded(np.ones(self._filled(index)), 0),
            "position_ids": self._row_positions,
        }
        return tuple(_stacked(makers[name or "input_ids"], indices) for name in self._shape.names)

    def labels(self, indices: Sequence[int]) -> Tensor:
        """Return int64 `(samples, tokens)`, -100 where nothing is learnt."""
        return _stacked(self._row_labels, indices)

    def _parts(self, index: int) -> list[slice]:
        return [slice(self._starts[number], self._starts[number + 1]) for number in self._rows[index]]

    def _filled(self, index: int) -> int:
        return sum(part.stop - part.start for part in self._parts(index))

    def _padded(self, row: npt.NDArray[np.generic], value: int) -> IntArray:
        return np.pad(row.astype(np.int64), (0, self._shape.length - len(row)), constant_values=value)

    def _row_tokens(self, index: int) -> IntArray:
        return self._padded(np.concatenate([self._tokens[part] for part in self._parts(index)]), self._shape.padding)

    def _row_positions(self, index: int) -> IntArray:
        parts = [np.arange(part.stop - part.start) for part in self._parts(index)]
        return np.concatenate([*parts, np.arange(self._shape.length - self._filled(index))]).astype(np.int64)

    def _row_labels(self, index: int) -> IntArray:
        parts = [np.where(self._counted[part], self._tokens[part], IGNORED_LABEL) for part in self._parts(index)]
        row = self._padded(np.concatenate(parts), IGNORED_LABEL)
        return np.append(row[1:], IGNORED_LABEL) if self._shape.shifted else row


def _stacked(make: Callable[[int], IntArray], indices: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.stack([make(index) for index in indices]))


def open_conversations(spec: ModelSpec, *, held_out: bool, shifted: bool) -> ChatSamples:
    """Read `chat:PATH`: what is trained on, or every sixteenth conversation, or the last one of fewer.

    A conversation longer than the sequence length is cut at its end; one of which nothing to learn is left, left out.

    Args:
        spec: the model on this data.
        held_out: the part that is held out, instead of the one to train on.
        shifted: whether a label is the token that follows; otherwise the model shifts labels itself.

    Raises:
        ConfigError: the path is missing, a row is bad, the template does not fit, or the model takes other things.
    """
    place = Path(spec.dataset.partition(":")[2])
    batch = unit_source(spec).batch()
    names = batch.names
    _check_model(spec, names)
    fields, parts = conversation_parts(place)
    if len(parts) == 1:
        every = min(HELD_OUT_EVERY, len(parts[0]))
        parts = [*apart(parts[0], every)] if every > 1 else [parts[0], []]
    renderer = Renderer(spec.chat, spec.tokenizer)
    length = spec.sequence_length or batch.inputs[0].shape[1]
    kept, cut, empty = [], 0, 0
    for one in renderer.rendered(parts[held_out]):
        short = Rendered(where=one.where, tokens=one.tokens[:length], counted=one.counted[:length])
        _check_tokens(spec, short)
        if short.counted.any():
            kept.append(short)
            cut += len(one.tokens) > length
        else:
            empty += 1
    if not kept:
        part = "held-out part" if held_out else "training part"
        raise ConfigError(
            f"data {place}: its {part} has no conversation with an answer in its first {length} tokens; give more, or "
            "a larger sequence length"
        )
    packing = spec.chat.packing
    rows = _packed([len(one.tokens) for one in kept], length) if packing else [[number] for number in range(len(kept))]
    shape = _Shape(length=length, padding=renderer.padding, names=names, shifted=shifted)
    note = (
        f"{len(kept)} conversations in {' and '.join(fields)}, "
        + (f"packed into {len(rows)} samples of {length} tokens" if packing else f"padded to {length} tokens")
        + f"; {cut} cut at the end, {empty} left out (no answer in what fits); "
        f"learnt: {spec.chat.train_on}; read as {spec.tokenizer or 'bytes'}"
    )
    return ChatSamples(kept, rows, shape, note)


def _packed(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Put the longest first, each where the least room is left that will do; return rows of numbers.

    >>> _packed([3, 5, 2, 6], 8)
    [[3, 2], [1, 0]]
    """
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    """Of each row with room: how much, and its number, in order."""
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        at = bisect_left(rooms, (lengths[number], 0))
        room, row = rooms.pop(at) if at < len(rooms) else (most, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
        if room > lengths[number]:
            left = (room - lengths[number], row)
            rooms.insert(bisect_left(rooms, left), left)
    return rows


def _check_tokens(spec: ModelSpec, one: Rendered) -> None:
    limit, largest = known_tokens(spec), int(one.tokens.max(initial=0))
    if limit is not None and largest >= limit:
        raise ConfigError(
            f"{one.where}: has the token {largest}, but {spec.name} knows 0 to {limit - 1}: give its own tokenizer "
            "(--tokenizer), or a model with a larger vocabulary"
        )


def _check_model(spec: ModelSpec, names: Sequence[str | None]) -> None:
    """Refuse a model that does not write text from the tokens before it, or that takes what is not known here."""
    why = ""
    given = ("input_ids", "attention_mask", "position_ids")
    unknown = [name for name in names if name is not None and name not in given]
    if spec.objective not in _CAUSAL:
        why = "conversations are for models that write one token after the other (...ForCausalLM)"
    elif unknown or names.count(None) > 1 or (names.count(None) == 0 and "input_ids" not in names):
        takes = ", ".join(name or "an input without a name" for name in names)
        why = f"it takes {takes}, and conversations give {', '.join(given)}; give FILE.py:FUNCTION with samples"
    elif spec.chat.packing and "position_ids" not in names:
        why = "packing tells conversations apart by position_ids, which it does not take; leave --packing out"
    elif spec.chat.packing and "attention_mask" in names:
        why = "packing tells conversations apart by position_ids, which count only without an attention_mask: leave it "
        why += "out of the example batch, or leave --packing out"
    if why:
        raise ConfigError(f"model {spec.name}: data {spec.dataset} cannot be used: {why}")
