"""Models that nobody edited, cut into units: a transformers configuration, or what a user's function returns.

batch      example batches: inputs and labels
factory    call a user's function
plain      the plain module behind what it returned: not compiled, without caches, of a kind that can be followed
source     load the model and its example batch: the library's class of a configuration, or the function's
draws      build a model with some of its parameters only, drawn as in the whole one
structure  which modules are blocks, and which only hold them
tape       what a forward did outside the blocks, as steps on values, for any number of samples
record     run a forward and write it down
derive     tensors that a closed module makes of parameters and constants alone, to be made again elsewhere
follow     open what can be followed, write its forward down for any number of samples
widen      one tape for any number of samples, of two tapes
cut        where the tape is cut: what each unit does, takes and gives
where      which line of the model's code is running
difference what a model would do otherwise in training mode
unit       a unit that runs its part of the tape on the original modules
check      numbers: are the parts the model, and its samples independent of each other
losses     the loss at the end: of labels, of the user's function, or the model's own
model      a model's units, found once and kept
"""
