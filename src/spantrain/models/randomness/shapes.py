"""Where the samples are in what is drawn: seen by running a model with two numbers of samples, or guessed."""

from collections.abc import Mapping, Sequence

from spantrain.core.records import Record

Sizes = tuple[int, ...]
ORDERS = frozenset({"randperm"})
"""Names of functions whose numbers belong together: they are drawn once for all samples, and never one for each."""


class DrawnShape(Record):
    """The shape of one draw."""

    dim: int | None
    """That has the samples; None: it is drawn once for all of them."""
    sizes: Sizes = ()
    """Of one sample's part, where that is known; a dimension that has several entries for each sample stays in it."""

    def of_sample(self, shape: Sequence[int], samples: int) -> Sizes:
        """Return the sizes of one sample's part of a shape.

        Raises:
            ValueError: it is not divided by samples.
        """
        if self.dim is None:
            return tuple(shape)
        if shape[self.dim] % samples:
            raise ValueError(f"a shape of {tuple(shape)} is not divided by {samples} samples along {self.dim}")
        each = shape[self.dim] // samples
        is_folded = each > 1 or len(self.sizes) == len(shape)
        return (*shape[: self.dim], *((each,) if is_folded else ()), *shape[self.dim + 1 :])


DrawnShapes = Mapping[str, DrawnShape]
"""By place."""


def seen_shape(small: Sizes, large: Sizes, samples: tuple[int, int]) -> DrawnShape | None:
    """Return the shape of what was drawn for two numbers of samples; None: they are not found in it."""
    if small == large:
        return DrawnShape(dim=None, sizes=small)
    growing = [dim for dim, (one, other) in enumerate(zip(small, large, strict=False)) if one != other]
    if len(small) != len(large) or len(growing) != 1:
        return None
    dim = growing[0]
    each, rest = divmod(small[dim], samples[0])
    if rest or each * samples[1] != large[dim]:
        return None
    return DrawnShape(dim=dim, sizes=(*small[:dim], *((each,) if each > 1 else ()), *small[dim + 1 :]))


def seen_shapes(
    small: Mapping[str, tuple[str, Sizes]],
    large: Mapping[str, tuple[str, Sizes]],
    samples: tuple[int, int],
    *,
    in_loops: bool = False,
) -> tuple[DrawnShapes, tuple[str, ...]]:
    """Return the shapes of what was drawn, noted by place with the function that drew it, and what is unlike.

    With `in_loops`, `multinomial` may be called for one sample after another: whether that matters is checked later.
    """
    found, unlike = dict[str, DrawnShape](), []
    for place in dict.fromkeys((*small, *large)):
        both = small.get(place), large.get(place)
        shape = seen_shape(both[0][1], both[1][1], samples) if both[0] and both[1] else None
        if in_loops and not both[0] and both[1] and both[1][0] == "multinomial":
            continue
        if shape is None or (shape.dim is not None and next(one[0] for one in both if one) in ORDERS):
            module = place.rpartition(":")[0].rpartition(">")[2] or "the model"
            sizes = " and ".join(str(one[1]) if one else "nothing" for one in both)
            name = next(one[0] for one in both if one)
            unlike.append(f"`{name}` in {module} draws {sizes} for {samples[0]} and {samples[1]} samples")
        else:
            found[place] = shape
    return found, tuple(unlike)


def guessed_shape(shape: Sizes, samples: int) -> DrawnShape:
    """Return where samples most probably are: first, folded into the first dimension, along another one, or nowhere."""
    if shape and shape[0] % samples == 0:
        return DrawnShape(dim=0)
    along = [dim for dim, size in enumerate(shape) if size == samples]
    return DrawnShape(dim=along[0] if along else None)
