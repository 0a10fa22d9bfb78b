"""A cluster's end: what its training loop calls after each step, its rounds, its session with master and shards.

Not here: when to push (`outer.policy`), pipelines that are one cluster (`outer.pipeline`).
To add a place where parameters lie: a `LiveParameters` in `parameters`.
"""
