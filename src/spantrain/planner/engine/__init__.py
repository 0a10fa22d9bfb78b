"""Asks strategies for plans, simulates what they propose, ranks, chooses, and says why.

Not here: the search for one plan (`planner.strategies`).
To add a rule of choice: `engine`; a sentence on it: `reasons`.
"""
