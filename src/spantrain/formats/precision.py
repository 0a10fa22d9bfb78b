"""In which numbers is computed; what is updated, summed over devices and saved is float32 in any case."""

EXPORTED = ("float32", "bfloat16", "float16")
"""What weights may be written in."""
LOW_WEIGHTS = "bfloat16-weights"
"""Weights are rounded to bfloat16 before each step, so that what goes from layer to layer has 16 bits, too."""
DTYPES = (*EXPORTED, LOW_WEIGHTS)
"""Those of 16 bits by autocast, float32 weights but for the last; float16 with a scaled loss
(`runtime.gradients.optimizer`)."""


def check_dtype(dtype: str) -> str:
    """Return a dtype that is one.

    Raises:
        ValueError: it is another.

    >>> check_dtype("float16")
    'float16'
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, got {dtype!r}")
    return dtype


def gathered_ratio(dtype: str) -> float:
    """Return the bytes of weights that are gathered to be computed with, for one byte of float32 weights."""
    return 0.5 if dtype == LOW_WEIGHTS else 1.0


def is_low(dtype: str) -> bool:
    """Whether products are computed in 16 bits.

    >>> [is_low(dtype) for dtype in DTYPES]
    [False, True, True, True]
    """
    return check_dtype(dtype) != "float32"
