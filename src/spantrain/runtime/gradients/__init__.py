"""Sums of gradients among replicas and tied stages, groups of processes, loss scale, the inner optimizer.

Not here: how long sums take (`cost`).
To add a way to sum: `stage_sums`.
"""
