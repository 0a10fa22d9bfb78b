"""The planners of other systems, each by its paper, with what of it is kept and what is not.

Not here: ours and plain baselines (`spantrain.planner.strategies`).
To add one: a function from `PlanRequest` to proposals, a line in `registered`, an entry point in pyproject.toml.
"""
