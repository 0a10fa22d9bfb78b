"""Ours: devices, order, cuts, replicas, shares and micro-batches together, by bounds and local search, then simulated.

Not here: large pools of alike devices (`pools`).
To add a move: `moves`; to add a start of the search: `orders`.
"""
