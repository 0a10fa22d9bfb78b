"""Models that nobody edited, followed through their own forward and cut into units.

Not here: units that are written by hand (`models.catalog`).
To add an operation: none is listed; what cannot be followed is refused with its place in the model's code.
"""
