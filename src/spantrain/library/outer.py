"""The outer optimizer over several clusters, as users import it."""

from spantrain.outer.client_metrics import OuterMetrics
from spantrain.outer.local import LocalParameterServer
from spantrain.outer.optimizer import OuterOptimizer, OuterOptions

__all__ = ["LocalParameterServer", "OuterMetrics", "OuterOptimizer", "OuterOptions"]
