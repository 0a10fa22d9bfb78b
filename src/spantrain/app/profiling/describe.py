"""A profile of a cluster of which nothing was measured: cluster and model in, what data sheets let one expect out."""

import hashlib
import json
import logging
from importlib.metadata import version
from pathlib import Path

from spantrain.app.cache import cache_folder, cached, keep_cached
from spantrain.config.artefacts import shipped_graph
from spantrain.config.files.json_codec import to_json
from spantrain.config.files.text_files import code_digest
from spantrain.core.cluster import Cluster
from spantrain.core.profile import Profile
from spantrain.core.units import ModelSpec, UnitGraph
from spantrain.cost.analytic import analytic_profile

_LOGGER = logging.getLogger(__name__)
_GRAPH = "spantrain-graph"
BUILDERS = tuple(Path(__file__).parents[2] / layer for layer in ("core", "models"))
"""What a graph is built by and made of; with the libraries, all that decides what is in one."""


def described_profile(cluster: Cluster, model: ModelSpec, *, dtype: str = "float32") -> Profile:
    """Return what the kinds' data sheets and the described network let one expect; no torch for models that ship.

    Raises:
        ValueError: there is no such dtype.
    """
    graph = shipped_graph(model, dtype)
    if graph is None:
        path = graph_file(model, dtype, BUILDERS)
        graph = cached(path, UnitGraph, _GRAPH, _LOGGER.warning)
        if graph is None:  # it takes seconds, with torch
            from spantrain.models.graph import build_graph

            graph = build_graph(model, dtype=dtype)
            keep_cached(graph, _GRAPH, path, _LOGGER.warning)
    return analytic_profile(cluster, model, graph, dtype=dtype)


def graph_file(model: ModelSpec, dtype: str, builders: tuple[Path, ...]) -> Path:
    """Return where a model's graph is kept that the code in these folders has built, with the libraries of today."""
    question = [to_json(model), dtype, code_digest(*builders), version("torch"), version("transformers")]
    digest = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:24]
    return cache_folder() / f"graph-{digest}.json"
