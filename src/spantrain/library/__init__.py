"""The way in from Python, for people with a loop of their own; `import spantrain` offers all of it, and loads it late.

trainer    a model's function, a loss, data and an optimizer: `fit` measures, plans and trains
loop       one step at a time, on batches that the user's own loop gives
arguments  how to train, by the names that people know from other trainers
callbacks  what users want to be told
functions  a function as the file and name that every worker can import
setting    what both ways in share: cluster, model, plan, workers
state      a checkpoint as the unsplit model's state_dict
progress   lines on standard error, and calls of callbacks
outer      the outer optimizer over several clusters, as users import it
outer_callback  the same for the Trainer of transformers
"""
