"""What computes: the processor, a CUDA device, an emulated device; the one place that knows them apart.

Not here: what is computed (`models.execution`).
To add a backend: a file with its `base.ComputeDevice`, and its row in `registry`, which imports no torch.
"""
