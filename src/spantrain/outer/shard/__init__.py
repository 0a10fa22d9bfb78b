"""A shard as a process: the layers it holds, pushes and versions, and snapshots that outlive it.

Not here: when it does what (`outer.policy`).
To add an update rule: `numerics`.
"""
