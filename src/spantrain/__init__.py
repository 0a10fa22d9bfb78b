"""Train one PyTorch model on unlike GPUs in several places.

From Python:

    ChatForm                                            how conversations become samples
    Trainer, TrainingArguments                          fit a model on data, evaluate, predict
    Callback, TrainerState, TrainerControl, StepMetrics what callbacks are told, and what they may want
    EvalPrediction, PredictionOutput                    what metrics are made of, and what predictions come as
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

_HOMES = {
    "ChatForm": "core.units",
    "Callback": "library.callbacks",
    "EvalPrediction": "library.evaluation",
    "LocalParameterServer": "outer.local",
    "OuterMetrics": "outer.client.metrics",
    "OuterOptimizer": "outer.client.optimizer",
    "OuterOptions": "outer.client.optimizer",
    "OuterTrainerCallback": "library.outer_callback",
    "PredictionOutput": "library.evaluation",
    "StepMetrics": "library.callbacks",
    "StepSession": "library.loop",
    "Trainer": "library.trainer",
    "TrainerControl": "library.callbacks",
    "TrainerState": "library.callbacks",
    "TrainingArguments": "library.arguments",
    "session": "library.loop",
}
"""Modules of what the library offers, by its names."""

__all__ = sorted((*_HOMES, "__version__"))

__version__ = VERSION


def __getattr__(name: str) -> Any:
    """Load what the library offers by name.

    Raises:
        AttributeError: there is no such thing.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'spantrain' has no attribute {name!r}")
    # gRPC reads it when it is loaded. Its handlers of fork() end the workers of a DataLoader in a process that talks to
    # workers or to a master; a DataLoader's workers do not use gRPC, and need none.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    return getattr(importlib.import_module(f"spantrain.{_HOMES[name]}"), name)
