"""Weights out of a run's checkpoint into the layout that transformers loads, and weights of a folder into a checkpoint.

Not here: the files of checkpoints themselves (`runtime.checkpoint`).
To add a layout: a function beside these two.
"""
