"""Graphs of models, each built once: to measure one takes longer than most of what tests do with it."""

from spantrain.core.units import ModelSpec, UnitGraph
from spantrain.models.graph import build_graph

_BUILT: dict[str, UnitGraph] = {}


def graph_of(model: ModelSpec) -> UnitGraph:
    """Return a model's graph; a specification has the digest of a user's own code."""
    text = repr(model)
    if text not in _BUILT:
        _BUILT[text] = build_graph(model)
    return _BUILT[text]
