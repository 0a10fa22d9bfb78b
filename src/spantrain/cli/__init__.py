"""The program: parse, call a use case, show what came out. It starts without torch.

main        the command table; where errors become exit codes
commands    demo, profile, groups, worker
plan        decide what runs where
plan_options  its options, and the job and the wishes that they make
explain     what limits a plan, and what would help
simulate    what a plan would do, under one schedule or all
simulate_adapter  its steps over links that change, with an adapter
train       train, and going on where a run stopped
train_options  its options
compare     other frameworks and other planners beside ours
export      weights for others, and weights of others
validate    how far predictions are from what was measured: runs of others, or a run of ours
schedule    look at an order of work, and check one
outer       clusters that never wait for each other: master, shards, their status, a cluster's command
outer_options  its options
outer_tables   how its master stands, where shards belong
outer_demo     its demonstration: a table that lives, and what came out
testbed     the commands that build, change and end an emulated network
testbed_traffic  traces that its links follow, and competing traffic on them
options     options that several commands share
failure     an error that nobody foresaw: a message, and a file with the traceback
interrupt   Ctrl-C and SIGTERM: end at once, or after this step with a checkpoint
render      live progress on standard error, tables on standard output
render_plan  a plan as a picture in text, and why
render_strategies  strategies in a table as wide as the terminal
text        lines, numbers and short lists for people
render_compare  rows of a comparison, bytes, bounds
render_validation  a live run beside its prediction
"""
