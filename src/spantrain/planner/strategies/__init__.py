"""Ways to decide what runs where, by name: ours, the two of the SpanTrain papers, and plain baselines.

Not here: the planners of other systems (the studies, as a package of plug-ins).
To add one: a function from `PlanRequest` to proposals, and a row in `registry` or an entry point.
"""
