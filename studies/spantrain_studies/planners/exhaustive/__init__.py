"""The true optimum of small cases: every plan is simulated that a proven bound does not rule out.

Not here: anything for large ones.
To widen it: `space`.
"""
