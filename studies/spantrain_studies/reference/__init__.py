"""Measured runs of other frameworks through our cost model and simulator: `python -m spantrain_studies.reference DIR`.

Not here: runs of ours (`spantrain validate`).
To add a platform: a file in platforms/, whose fitted constants `--leave-one-out` prints.
"""
