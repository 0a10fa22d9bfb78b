"""outer.yaml: where master and shards are, the numbers of the outer optimizer, places and clusters.

Not here: the types behind them (`outer.policy.settings`, `outer.policy.rule`).
To add a number: a field in `numbers`.
"""
