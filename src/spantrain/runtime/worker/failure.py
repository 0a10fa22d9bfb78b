"""What a worker tells of an order that failed: whose error it was, so that the right thing is said of it."""

import traceback

import torch
from torch.distributed import DistError

from spantrain.errors import Interrupted, PeerLostError, SpanTrainError, UsageError
from spantrain.models.tracing.factory import what_was_raised
from spantrain.runtime.control.requests import OrderFailure

_MODEL = "spantrain/models/tracing/unit.py"
"""Where the model's own code is called."""
_ENVIRONMENT = ("alloc", "out of memory", "gloo", "NCCL", "CUDA error", "cuDNN", "cuBLAS")
"""In texts of torch's RuntimeErrors that are no error of a program: memory, network, driver."""


def told(error: BaseException) -> OrderFailure:
    """Return what the coordinator is told of an error."""
    own = isinstance(error, SpanTrainError)
    text = str(error) if own else f"{type(error).__name__}: {error}"
    if not own and _in_the_model(error):
        text = f"the model's own code failed on these samples: {what_was_raised(error)}"
    return OrderFailure(
        error=text,
        caused_elsewhere=isinstance(error, (PeerLostError, Interrupted)),
        usage=isinstance(error, UsageError),
        internal=not own and not _in_the_model(error) and not _of_the_environment(error),
    )


def _in_the_model(error: BaseException) -> bool:
    """Whether it was raised in code of the model's: at the end of the calls from a unit, not in the unit itself."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return any(file.endswith(_MODEL) for file in files[:-1]) and not files[-1].endswith(_MODEL)


def _of_the_environment(error: BaseException) -> bool:
    if isinstance(error, (OSError, MemoryError, DistError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _ENVIRONMENT)
