"""The window that gathers pushes, what each weighs, which are left out, and the update that follows.

Not here: the arithmetic on tensors (`outer.shard`).
To add a check of pushes: `guard`.
"""
