"""Data: what every other layer speaks of. Standard library only.

spans       samples and pieces of samples
speed       how fast a device or a link is over time
action      F, B, I, W on a span; the one truth about order
parts       which part of a tensor a member of a tensor-parallel group holds
shares      how much of a unit such a member has
names       what sites, hosts and devices may be called
quantities  "100 Mbit/s" <-> bytes per second
cluster     kinds, devices, hosts, sites, links
units       the model as a chain of units and cuts
profile     measurements
job         how to train
precision   the types that products are computed in
hints       an order of work found when planning
outer       sites that train by themselves, joined by an outer optimizer
outer_layers    which layers of the model the outer optimizer's shards hold
outer_events    what the outer optimizer's master hears
outer_commands  what it commands
outer_stages    what the stages of a pipeline that is a cluster tell each other
sums        how the replicas of a stage sum gradients: whose way, which buckets
plan        stages, replicas, spans, predictions
checkpoint  what a checkpoint holds, and the samples that were consumed
links       what a device knows of the links to its peers while it trains
messages    events and commands of policies; the address of a message
decisions   what a policy heard and answered, as text that parses back
trace       what happened on each lane
"""
