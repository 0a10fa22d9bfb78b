"""Train one PyTorch model on unlike GPUs in several places.

From Python:

    Trainer, TrainingArguments, Callback, StepReport    fit a model on data
    ChatForm                                            how conversations become samples
    session, StepSession                                one step at a time, in a loop of one's own
    OuterOptimizer, OuterOptions, OuterMetrics          several clusters that never wait for each other
    OuterTrainerCallback                                the same, for the Trainer of transformers
    LocalParameterServer                                its master and shards, in this process

They are loaded when they are first asked for: `import spantrain` loads neither torch nor anything else.
"""

import importlib
import os
from typing import Any

from spantrain.version import VERSION

__all__ = [
    "Callback",
    "ChatForm",
    "LocalParameterServer",
    "OuterMetrics",
    "OuterOptimizer",
    "OuterOptions",
    "OuterTrainerCallback",
    "StepReport",
    "StepSession",
    "Trainer",
    "TrainingArguments",
    "__version__",
    "session",
]

__version__ = VERSION


def __getattr__(name: str) -> Any:
    """Load what the library offers by name.

    Raises:
        AttributeError: there is no such thing.
    """
    homes = {
        "Callback": "progress",
        "ChatForm": "setting",
        "LocalParameterServer": "outer",
        "OuterMetrics": "outer",
        "OuterOptimizer": "outer",
        "OuterOptions": "outer",
        "OuterTrainerCallback": "outer_callback",
        "StepReport": "progress",
        "StepSession": "loop",
        "Trainer": "trainer",
        "TrainingArguments": "arguments",
        "session": "loop",
    }
    if name not in homes:
        raise AttributeError(f"module 'spantrain' has no attribute {name!r}")
    if homes[name].startswith("outer"):
        # gRPC reads it when it is loaded. Its handlers of fork() end the workers of a DataLoader in a process that
        # talks to a master; these workers do not use gRPC, and need none.
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    return getattr(importlib.import_module(f"spantrain.library.{homes[name]}"), name)
