"""Before anything runs: machines as they are become a cluster file, and are checked for what would stop a run.

Not here: how a machine is reached and asked (`reach`), and the measuring that plans are made from (`app.profiling`).
To add a check: a function in `checks`, called by `doctor`.
"""
