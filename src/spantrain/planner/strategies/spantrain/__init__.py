"""The planner of the English SpanTrain paper (section 3.3): cost model, beam search, second-level layouts.

Not here: anything of ours beyond the paper.
What is kept of the paper and what is not stands in `strategy`.
"""
