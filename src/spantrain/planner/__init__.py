"""From a profile and a job to a plan.

Not here: costs (`cost`), the simulator (`sim`), commands (`app`).
To add a strategy: a file in `strategies`, or a package with the entry point `spantrain.strategies`.
"""
