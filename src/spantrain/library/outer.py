"""The outer optimizer over several clusters, as users import it."""

from spantrain.outer.client.metrics import OuterMetrics
from spantrain.outer.client.optimizer import OuterOptimizer, OuterOptions
from spantrain.outer.local import LocalParameterServer

__all__ = ["LocalParameterServer", "OuterMetrics", "OuterOptimizer", "OuterOptions"]
