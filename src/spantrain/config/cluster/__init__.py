"""cluster.yaml, the kinds of devices, and clusters by name.

Not here: how their links change over a run (`config.traces`).
To add a kind: a row in kinds.yaml with its source. To add a preset: a file in presets/.
"""
