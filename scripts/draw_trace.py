"""Draw one step of a trace as an SVG: a row for each device, its actions, and the messages between rows.

python scripts/draw_trace.py runs/demo/trace.json docs/demo-step.svg
"""

import sys
from pathlib import Path

from spantrain.config.traces.trace_file import read_trace
from spantrain.schedule.render.svg import draw_trace

if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: draw_trace.py TRACE.json PICTURE.svg")
    Path(sys.argv[2]).write_text(draw_trace(read_trace(Path(sys.argv[1]))))
