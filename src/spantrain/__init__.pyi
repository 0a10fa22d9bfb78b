from spantrain.core.units import ChatForm
from spantrain.library.arguments import TrainingArguments
from spantrain.library.callbacks import Callback, StepMetrics, TrainerControl, TrainerState
from spantrain.library.evaluation import EvalPrediction, PredictionOutput
from spantrain.library.loop import StepSession, session
from spantrain.library.outer_callback import OuterTrainerCallback
from spantrain.library.trainer import Trainer
from spantrain.outer.client.metrics import OuterMetrics
from spantrain.outer.client.optimizer import OuterOptimizer, OuterOptions
from spantrain.outer.local import LocalParameterServer

__all__ = [
    "Callback",
    "ChatForm",
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
