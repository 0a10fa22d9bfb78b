"""In which numbers products are computed: parameters, gradients and optimizer state are float32 in any case."""

DTYPES = ("float32", "bfloat16", "float16")
"""The last two by autocast; float16 with a scaled loss (`runtime.gradients.optimizer`)."""


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


def is_low(dtype: str) -> bool:
    """Whether products are computed in 16 bits.

    >>> [is_low(dtype) for dtype in DTYPES]
    [False, True, True]
    """
    return check_dtype(dtype) != "float32"
