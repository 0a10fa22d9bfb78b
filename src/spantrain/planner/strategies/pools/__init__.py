"""The search over counts of alike devices: for large clusters, and for what Megatron-like frameworks run.

Not here: devices one by one (`auto`).
To add a source of costs: the protocol in `costs`.
"""
