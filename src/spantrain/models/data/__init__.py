"""Data sets: inputs and labels of samples, each from its index alone, and which samples belong to which step.

Not here: who reads which samples (`runtime.step.work`).
To add a source: a class in a file of its own, chosen in `choice`.
"""
