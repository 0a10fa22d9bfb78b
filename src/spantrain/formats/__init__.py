"""What numbers are computed with, and sent as between stages and clusters: sizes, rounding to few bits, and back.

Not here: who chooses a format (`planner`), and who sends (`runtime`, `outer`). No module imports torch at its top.
To add a format: its codec (`codec.BlockCodec` or another) and its line in `registry.WireFormat`.
"""
