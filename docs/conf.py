"""The documentation as a site: `make docs` writes it to build/docs, and fails where a link leads nowhere."""

import subprocess
import sys
from pathlib import Path

import spantrain
from spantrain.version import VERSION

project = "SpanTrain"
release = VERSION
extensions = ["myst_parser", "sphinxcontrib.mermaid", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"SpanTrain {VERSION}"
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
autodoc_default_options = {"members": True, "imported-members": True, "member-order": "bysource"}
autodoc_typehints = "description"

for name in spantrain.__all__:  # they are loaded late, when they are asked for: autodoc looks at what is there
    setattr(spantrain, name, getattr(spantrain, name))

commands = [
    sys.executable,
    "-m",
    "typer",
    "spantrain.cli.main",
    "utils",
    "docs",
    "--name",
    "spantrain",
    "--title",
    "Commands",
]
page = subprocess.run(commands, check=True, capture_output=True, text=True).stdout
(Path(__file__).parent / "commands.md").write_text(page, "utf-8")


def setup(app):
    """Leave the docstrings of attributes as they are: napoleon takes what stands before a colon in them for a type."""
    kept = {}
    app.connect("autodoc-process-docstring", lambda *event: kept.update({event[2]: list(event[5])}), priority=100)
    app.connect("autodoc-process-docstring", lambda *event: restore(event, kept.pop(event[2])), priority=900)


def restore(event, lines):
    """Put the lines of an attribute's docstring back."""
    if event[1] == "attribute":
        event[5][:] = lines
