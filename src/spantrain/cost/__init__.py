"""What things cost in seconds, bytes, money and energy: the only place where time is computed (DESIGN house rule 4).

analytic     seconds of an emulated device, from its data sheet
compute      seconds of units and stages, interpolated between measured sample counts
tensor       seconds of units on tensor-parallel groups of equal and unequal shares
network      seconds of transfers, and what they share: links between places, ports of hosts, lines of sites
fairness     how flows that take several links share them
sharing      which of the links on their ways pairs of devices make scarce for each other
collectives  seconds of sums over devices: ring, tree, hierarchical; in buckets
sum_models   how frameworks sum gradients: their settings, what carries them
buckets      gradient sums in buckets beside the last backward: which are ready when, what is left behind it
contention   how gradient sums of several stages slow each other down
recompute    what a unit does in an action if its activations are computed again
replicas     what a stage's replicas take together: actions, gradient sums, gathers of what they divide
memory       peak bytes of a device; samples in flight that fit
platform     another training framework: what it adds to time and memory (constants in platforms/)
money        rents, electricity and egress of a step, by the list prices in prices.yaml
energy       joules of devices that work and wait, and of the network between sites
step         closed-form estimate of a plan's step, with the term that bounds it
"""
