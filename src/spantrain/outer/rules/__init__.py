"""The update rules of the outer optimizer: how a shard steps along the mean of its clusters' pushes.

Not here: the mean itself, clipping, versions (`outer.shard`).
To add a rule: a file here with an `OuterRule`; outer.yaml names it under `rule`, beside its numbers.
"""
