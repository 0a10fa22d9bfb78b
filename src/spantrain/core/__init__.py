"""Data that every other layer speaks of: frozen dataclasses, standard library only.

Not here: files, clocks, arithmetic of costs, decisions.
To add a type: checked in `__post_init__`, SI units in its names.
"""
