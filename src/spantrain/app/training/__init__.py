"""A training run from files to what it leaves in its folder: request, session, steps, adapter, outcome.

Not here: what coordinator and workers do (`runtime`).
To add something that a run keeps: `run_folder` writes it, `outcome` counts it.
"""
