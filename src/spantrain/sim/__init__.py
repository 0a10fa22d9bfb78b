"""The virtual-clock driver of the dispatch policies.

clock      events in the order of their time
network    connections between devices, and which links carry what
sending    what a message takes, and one on its way
link       a link that shares itself among its messages
mesh       messages that need several links at once
memory     bytes that devices hold over time
costs      seconds of actions, transfers and the end of a step
sums       gradient sums of stages that slow each other down
replica    one replica: its policy, what it runs and holds
record     intervals and flows of a simulated run
engine     runs a plan for a few steps
stale      steps that overlap, with weights one step old
slowed     costs over links that are slower than planned
adaptive   several steps over links that change, with the adapters
reference_costs    a measured run of another framework as a plan with costs, simulated
reference_layers   its layers: seconds and bytes, those not profiled estimated
reference_network  its transfers and ring sums
reference_pools    its figures as costs that the search over pools asks for
fold       a plan of like pipelines, run as one of each sort
bound      seconds that no order of work can beat
rounds     the tightest of them, for micro-batches that are all cut alike
search     the order of work that `critical-path` follows, found by simulating many
search_spans       micro-batches to go with it: fine or coarse, small at the ends
search_improve     makes an order shorter
search_exhaustive  the best order of a small step
search_model       a step as plain numbers
search_run         runs it, hundreds of times
outer      clusters that never wait for each other: the outer optimizer's master and clients, with faults
outer_case     who trains over which lines, and what happens meanwhile
outer_bodies   what clusters and shards hold
outer_members  a cluster and a shard: what they do, and how long it takes
outer_rounds   the rounds of one fragment of a simulated cluster
outer_lines    lines of members, shared by all that goes over them
outer_methods  other ways to train over clusters
outer_result   what came of it
replay     a live run's decisions made again, with the first difference
"""
