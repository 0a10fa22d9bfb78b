"""Links and devices that change over a run, by name or from a file, and traces of runs read back.

Not here: what follows them (`testbed`, `sim`).
To add a network by name: a function in `library`.
"""
