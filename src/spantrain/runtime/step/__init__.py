"""One step of one replica: its policy driven by the wall clock, messages in and out, actions done and recorded.

Not here: what to do next (`schedule.dispatch`), sums (`runtime.gradients`).
To add something that is recorded: `recorder`.
"""
