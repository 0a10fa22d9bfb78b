"""Samples that have arrived, in pieces, until an action takes them."""

import torch

from spantrain.core.span import Span

Tensors = tuple[torch.Tensor, ...]


class Inbox:
    """Pieces by (step, lane); handed out as whole spans, however they were cut on the way."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[int, str], list[tuple[Span, Tensors]]] = {}

    def add(self, step: int, lane: str, span: Span, tensors: Tensors) -> None:
        """Keep one piece; every tensor's first dimension is the span's samples."""
        self._pieces.setdefault((step, lane), []).append((span, tensors))

    def spans(self, step: int, lane: str) -> tuple[Span, ...]:
        """Return what lies here, in order of arrival."""
        return tuple(span for span, _ in self._pieces.get((step, lane), ()))

    def take(self, step: int, lane: str, span: Span) -> Tensors:
        """Hand out the samples of a span and forget them; all of them must be here."""
        kept: list[tuple[Span, Tensors]] = []
        found: list[tuple[Span, Tensors]] = []
        for piece, tensors in self._pieces.get((step, lane), ()):
            part = piece.intersect(span)
            if part is None:
                kept.append((piece, tensors))
                continue
            found.append((part, _slice(tensors, piece, part)))
            kept.extend((rest, _slice(tensors, piece, rest)) for rest in _remainders(piece, part))
        found.sort(key=lambda entry: entry[0])
        assert sum(part.size for part, _ in found) == span.size, f"samples of {span} are missing"
        self._pieces[step, lane] = kept
        if len(found) == 1:
            return found[0][1]
        return tuple(torch.cat(parts) for parts in zip(*(tensors for _, tensors in found), strict=True))

    def held_bytes(self) -> int:
        """Return the bytes of all that lies here."""
        return sum(tensor.nbytes for pieces in self._pieces.values() for _, tensors in pieces for tensor in tensors)

    def forget_before(self, step: int) -> int:
        """Drop what belongs to earlier steps; return how many pieces that was."""
        old = [key for key in self._pieces if key[0] < step]
        return sum(len(self._pieces.pop(key)) for key in old)

    def clear(self) -> None:
        """Drop everything."""
        self._pieces.clear()


def _slice(tensors: Tensors, piece: Span, part: Span) -> Tensors:
    if part == piece:
        return tensors
    return tuple(tensor[part.lo - piece.lo : part.hi - piece.lo] for tensor in tensors)


def _remainders(piece: Span, part: Span) -> list[Span]:
    rest = []
    if piece.lo < part.lo:
        rest.append(Span(piece.lo, part.lo))
    if part.hi < piece.hi:
        rest.append(Span(part.hi, piece.hi))
    return rest
