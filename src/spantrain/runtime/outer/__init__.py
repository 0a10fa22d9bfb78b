"""A run that is one cluster of an outer optimizer: which stage moves which layers, and when they meet.

Not here: the protocol (`outer.pipeline`).
To add a place where parameters lie: `part`.
"""
