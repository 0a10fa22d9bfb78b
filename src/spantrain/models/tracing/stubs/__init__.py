"""The second way to cut: each unit runs the model's own forward, in which the blocks of other units are stubs.

Not here: when it is taken, and that its units do what the model does (`tracing.model`, `tracing.check`).
To add a kind of block: nothing is listed; blocks are found where the model repeats itself.
"""
