from spantrain.library.arguments import TrainingArguments
from spantrain.library.callbacks import Callback, StepMetrics, TrainerControl, TrainerState
from spantrain.library.evaluation import EvalPrediction, PredictionOutput
from spantrain.library.loop import StepSession, session
from spantrain.library.outer import LocalParameterServer, OuterMetrics, OuterOptimizer, OuterOptions
from spantrain.library.outer_callback import OuterTrainerCallback
from spantrain.library.trainer import Trainer

__all__ = [
    "Callback",
    "EvalPrediction",
    "LocalParameterServer",
    "OuterMetrics",
    "OuterOptimizer",
    "OuterOptions",
    "OuterTrainerCallback",
    "PredictionOutput",
    "StepMetrics",
    "StepSession",
    "Trainer",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "__version__",
    "session",
]

__version__: str
