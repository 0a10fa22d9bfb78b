"""Seconds that no order of work can beat (DESIGN section 5), with proofs.

Not here: orders that come near them (`sim.search`).
To add a bound: prove it in its docstring, and take the largest of all.
"""
