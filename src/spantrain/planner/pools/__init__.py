"""The search over counts of alike devices: for large clusters, and for what Megatron-like frameworks run.

- members: pools of alike devices, and plans that say what runs where by pool and not by device
- costs: what the search asks of a source of costs, with every term that a device or a link is busy for
- profile_costs: a profile of ours as such a source
- goal: what is best, and which limits are kept
- sketches: how many stages of which kind: all counts at once, by what perfect cuts would take
- recipes: who makes up a stage, and its seconds and bytes for every range of units
- cuts: where the cuts lie: the least slowest stage, then the least sum
- pipeline: the seconds of one pipeline under 1F1B, to the last micro-batch
- placing: which sites run which replicas, and on which hosts
- moves: small changes of a candidate's stages
- search: all of it
"""
