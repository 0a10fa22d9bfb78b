"""Make the unit graphs that ship with the program: all models of the catalog, or those that are named.

python scripts/make_graphs.py [MODEL ...]
"""

import sys
from pathlib import Path

import torch
import transformers

from spantrain.config.artefacts import ShippedGraph
from spantrain.config.files.json_codec import render_json, to_json
from spantrain.config.files.text_files import write_atomically
from spantrain.models.catalog.catalog import MODEL_NAMES, resolve_model
from spantrain.models.graph import build_graph

FOLDER = Path(__file__).parents[1] / "src" / "spantrain" / "config" / "graphs"


def main() -> None:
    """Build and write."""
    made_with = f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}"
    for name in sys.argv[1:] or MODEL_NAMES:
        spec = resolve_model(name)
        shipped = ShippedGraph(model=spec, graph=build_graph(spec), made_with=made_with)
        write_atomically(FOLDER / f"{name}.json", render_json(to_json(shipped)) + "\n")
        sys.stdout.write(f"{name}: {len(shipped.graph.units)} units\n")


if __name__ == "__main__":
    main()
