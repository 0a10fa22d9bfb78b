"""Train one PyTorch model on unlike GPUs in several places.

From Python:

    Trainer, TrainingArguments, Callback, StepReport    fit a model on data
    session, StepSession                                one step at a time, in a loop of one's own

They are loaded when they are first asked for: `import spantrain` loads neither torch nor anything else.
"""

import importlib
from typing import Any

__all__ = [
    "Callback",
    "StepReport",
    "StepSession",
    "Trainer",
    "TrainingArguments",
    "__version__",
    "session",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Load what the library offers by name.

    Raises:
        AttributeError: there is no such thing.
    """
    homes = {
        "Callback": "callbacks",
        "StepReport": "callbacks",
        "StepSession": "loop",
        "Trainer": "trainer",
        "TrainingArguments": "arguments",
        "session": "loop",
    }
    if name not in homes:
        raise AttributeError(f"module 'spantrain' has no attribute {name!r}")
    return getattr(importlib.import_module(f"spantrain.library.{homes[name]}"), name)
