"""Random numbers of training: a hash of seed, step, sample and place, the same however a model is cut and run.

`draws` says what is drawn so, `places` what a place is called; under `draws.seeded` plain PyTorch draws the same.
Not here: which modules are in training mode (`models.units`).
To add a function of torch that draws: `draws`.
"""
