"""Tensors that change devices: a plan of who gives what to whom, its transfer, and the change of plan between steps.

Not here: whether to change (`adaptation.boundary`).
To add a way to divide tensors: `exchange` plans for any.
"""
