"""From a profile and a job to a plan.

job         what is to be trained
request     objective, constraints, what strategies are asked and answer
groups      first- and second-level groups from measurements
tree        groups as lines of text
layouts     ways to set a domain's devices up as slots (future stages)
in_flight   bytes of one sample in flight, over all spans of units
tables      cost arrays of slots, over all spans of units
cuts        the dynamic programme that places the cuts
search      domains, orders, layouts and micro-batches: the candidates, best first
shares      how many samples of a micro-batch each device of a stage takes
assemble    stages and a static schedule as a Plan that fits: what other papers' strategies are written in
build       a candidate as a Plan, with whole-sample shares and in-flight limits
recompute   units to compute again where memory is short
sequence    slices of the sequence in tensor-parallel groups, where they are asked for
sum_buckets the settings of gradient sums that suit a plan best
outer       which sites an outer optimizer should join, and what its exchanges take
explain     reasons in sentences; refusals with numbers
pools       the search over counts of alike devices: large clusters, Megatron-like frameworks
strategies  ways to decide what runs where, a file each
"""
