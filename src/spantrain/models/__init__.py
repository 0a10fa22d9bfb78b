"""Real networks cut into units, divided among devices, executed, and the data they train on.

Not here: which device does what (`planner`), and messages (`runtime`).
To add a model: nothing, if transformers or a function of yours builds it (`tracing`).
"""
