"""The planner of the Chinese SpanTrain paper (section 2): groups, a dynamic programme over cuts and domains.

Not here: what all strategies share (`planner.assembly`).
What is kept of the paper and what is not stands in `strategy`.
"""
