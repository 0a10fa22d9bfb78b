"""Measuring: what devices compute and what links carry (SpanTrain, section 3.2.1).

Not here: who measures when (`app.profiling`).
To add a task for scores: `compute.TASKS`.
"""
