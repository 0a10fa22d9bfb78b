"""Which layers go next between which cluster and which shard.

Not here: the bytes (`transport.layers`).
To add an order of layers: `transfers`.
"""
