"""Links that transfers share, on the virtual clock.

Not here: real ones (`transport`, `testbed`).
To add a kind of sharing: a class with the calls of `Network`.
"""
