"""What other systems do when devices leave and come, by virtual time: policies by their papers, over predicted steps.

Not here: ours (`spantrain.sim.availability`), nor what measures time.
To add one: a `Rival` in a module of its own whose docstring says what of the paper is modelled, a line in `rivals`.
"""
