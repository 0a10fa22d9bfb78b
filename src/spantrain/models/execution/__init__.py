"""A stage's work on its units: F, I, W and B for spans of samples, what they hold, in any order.

Not here: what to do next (`schedule.dispatch`), and when (`runtime.step`).
To add a kind of pass: `stage`, with its halves in `models.weight_gradients`.
"""
