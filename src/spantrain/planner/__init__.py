"""From a profile and a job to a plan.

job         what is asked for
groups      first- and second-level groups from measurements
tree        groups as lines of text
layouts     ways to set a domain's devices up as slots (future stages)
tables      cost arrays of slots, over all spans of units
cuts        the dynamic programme that places the cuts
search      domains, orders, layouts and micro-batches: the candidates, best first
build       a candidate as a Plan, with whole-sample shares and in-flight limits
explain     reasons in sentences; refusals with numbers
spantrain   the planner itself: plan_spantrain_dp, candidates
baselines   best single device, best single site
"""
