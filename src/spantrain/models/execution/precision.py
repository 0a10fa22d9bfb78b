"""Autocast: which type torch computes products in."""

import torch

from spantrain.core.precision import check_dtype


def autocast_dtype(dtype: str) -> torch.dtype | None:
    """Return the type that products are computed in; None: that of the parameters, float32.

    Raises:
        ValueError: it is none of `core.precision`.
    """
    return {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[check_dtype(dtype)]
