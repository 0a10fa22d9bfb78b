"""Wires: tensors between devices, layers between clusters and shards, control messages.

Not here: what they mean (`runtime`, `outer`).
To add a wire: a payload protocol on `connection`.
"""
