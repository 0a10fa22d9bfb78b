"""Layers of named parameters between shards and clusters: large frames, few copies, only what is expected.

Not here: which layer goes next (`outer.policy`).
To add a frame: `format`, with its bounds and a target for the fuzzer.
"""
