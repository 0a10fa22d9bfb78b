"""What numbers are sent as between stages and clusters: sizes, rounding to few bits, and back.

Not here: who chooses a format (`planner`), and who sends (`runtime`, `outer`).
To add a format: one file that registers its name, its bytes and its two functions.
"""
