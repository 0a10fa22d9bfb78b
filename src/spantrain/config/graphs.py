"""Unit graphs of the catalog's models that ship with the program, so that planning needs neither torch nor its seconds.

`scripts/make_graphs.py` makes the files in `graphs/`, one for each model, in float32.
"""

from dataclasses import dataclass
from importlib import resources

from spantrain.config.files.json_codec import from_json, to_json
from spantrain.config.files.parsing import parse_json
from spantrain.core.units import ModelSpec, UnitGraph


@dataclass(frozen=True, kw_only=True)
class ShippedGraph:
    """A model's units as a certain version of the libraries builds them."""

    model: ModelSpec
    graph: UnitGraph
    made_with: str
    """Versions of torch and transformers."""


def shipped_graph(spec: ModelSpec, dtype: str = "float32") -> UnitGraph | None:
    """Return the graph of a model, or None if none ships for exactly this one (data set aside)."""
    file = resources.files("spantrain.config") / "graphs" / f"{spec.name}.json"
    if dtype != "float32" or not file.is_file():
        return None
    where = f"graphs/{spec.name}.json"
    found = from_json(ShippedGraph, parse_json(file.read_text(encoding="utf-8"), where), where)
    return found.graph if _shape(found.model) == _shape(spec) else None


def _shape(spec: ModelSpec) -> object:
    """Return what a graph depends on, in the form that it has in a file."""
    plain = to_json(spec)
    return [plain[name] for name in ("family", "config", "sequence_length", "objective")]
