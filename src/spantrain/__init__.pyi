from spantrain.library.arguments import TrainingArguments
from spantrain.library.loop import StepSession, session
from spantrain.library.outer import LocalParameterServer, OuterMetrics, OuterOptimizer, OuterOptions
from spantrain.library.outer_callback import OuterTrainerCallback
from spantrain.library.progress import Callback, StepReport
from spantrain.library.trainer import Trainer

__all__ = [
    "Callback",
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

__version__: str
