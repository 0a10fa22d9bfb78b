"""Tensor parallelism in any ratio: what a member of a group holds of a model's units, and how members agree.

Not here: the groups of processes (`runtime.gradients.members`).
To add a family: a row of `rules.PATTERNS` by names; for new structure, a rule in a file of its own, named in `find`.
"""
