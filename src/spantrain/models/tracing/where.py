"""Where in the model's own code something happens."""

import sys
from pathlib import Path

import torch

_PACKAGE = str(Path(__file__).parents[2])
_NOT_THE_MODEL = (str(Path(torch.__file__).parent), _PACKAGE, "transformers/utils", "transformers/modeling_layers")


def line_of_model() -> str:
    """Return FILE:LINE of the innermost code that is neither torch's nor this package's; empty: there is none."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if not any(folder in file for folder in _NOT_THE_MODEL):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
