"""outer.yaml: where master and shards are, the numbers of the outer optimizer, places and clusters.

Not here: the numbers' bounds, which their fields have (`outer.policy.settings`, `outer.policy.guard`, `outer.rules`).
To add a number: a field there.
"""
