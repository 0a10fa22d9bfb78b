"""Tensors to and from named peers: encrypted, bounded, in lanes; either side dials.

Not here: who needs which samples (`runtime.step`).
To add a frame: `wire`, with its bounds and a target for the fuzzer.
"""
