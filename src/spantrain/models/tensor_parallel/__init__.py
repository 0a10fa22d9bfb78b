"""Tensor parallelism in any ratio: what a member of a group holds of a model's units, and how members agree.

Not here: the groups of processes (`runtime.gradients.groups`).
To add a family of modules: its rules in `rules`, its layers in a file of their own.
"""
