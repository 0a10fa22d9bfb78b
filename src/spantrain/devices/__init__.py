"""What computes: the processor, a CUDA device, an emulated device; the one place that knows them apart.

Not here: what is computed (`models.execution`).
To add a backend: a class in a file of its own, registered in `registry`.
"""
