"""What an update of the parameters is: the learning rate of a step (`rates`) and the optimizer (`optimizers`).

To add a schedule: a function of the step and a `Course` in `rates`, its options as keywords, and its name in the table
there. To add an optimizer: a row of `OPTIMIZERS`; the memory of its state follows. Not here: the update itself
(`runtime.gradients.optimizer`).
"""
