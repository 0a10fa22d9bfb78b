"""Decision machines: no clock, no input or output, no torch.

dispatch   what a replica of a stage does next
machine    what all dispatch policies share: tasks, state, what is ready
two_steps  two steps at once, with weights one step old
planned    follows an order found when planning
recut      other micro-batches in mid-step
monitor    what a sender learns of its links
tasks      what a replica is told of a plan
loss_scale  how large the loss is made under float16, agreed over all stages
adapter    what changes when the network does: in a step and between two
outer      pushes, updates and pulls of clusters that train whole copies
limits     in-flight limits that would stop the pipeline, found before it runs
routing    who sends which samples to whom
"""
