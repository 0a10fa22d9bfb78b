"""Use cases: inputs in, a result dataclass out; the command line and tests call them in the same way.

session     a coordinator with workers: here, on an emulated network, or on machines that join
profile     measure compute, network and runtime: cluster and model in, profile out
rehearsal   what the runtime itself costs, from a few steps of a small model
plan        strategies propose, the simulator ranks: profile, job and wishes in, plan and comparison out
plan_memory   whether a plan fits over time, where W is put off
plan_outcome  what is wished of a plan, and what came of planning
outer       groups that train by themselves, joined by an outer optimizer: the third way over slow boundaries
plan_files  a plan file with its profile, checked against each other
plan_reasons  why a plan was chosen, which sites are in or out
plan_reference  plans for what other frameworks run, on figures measured by others
evaluate    what a plan would do, on the scale that all strategies share
describe    a profile by data sheets, for a cluster that nobody measured
explain     what limits a plan, and what would help most
what_if     profiles and plans with one thing changed
adapt       the adapter of a run, by a profile's costs: what follows the network while it trains
replan      plans anew for links as they are now, in a process beside the run
predict     what a plan should do: the event simulator with a profile's costs
schedule    what a schedule does, on even stages or on a plan; is an order in a file one that can run?
picture     the picture of a schedule as PNG
network_trace  links that change while a plan is simulated
traced_run     links that change while a plan runs on the testbed
simulate    time, memory, money and energy of a plan under each schedule
simulate_adapter  steps of a plan over links that change, with an adapter
validate    measured runs of others through the cost model and the simulator: predictions, errors
validate_run  a live run compared with its prediction, its decisions made again
requests    files into a training request: a plan, or an earlier run's checkpoint
train       train a plan: losses, figures of devices and links, trace out
train_outcome  those figures
plan_changes   the plans that a run has had, one after another
export      from a run's checkpoint to a folder that the transformers library loads
import_     from a folder of weights to a checkpoint
first_weights  what a new run begins with: the weights of a folder, or new ones
steps       train on batches that a user's own loop gives, one step at a time
trainable   what of a plan training cannot do yet
staleness   what steps that overlap do not go with
old_run     a folder that holds a run already: refused, or the run in it removed
run_folder  what a run leaves in its folder: plan, profile, trace, decisions, figures of its steps
emulation   whether emulated devices had the time that emulation needs
quick       from a model's name to training in one go
slowing     emulated devices slow enough for a model that they really compute
compare     the same training by other frameworks and other planners, in turn
compare_methods  what there is to compare, by name
compare_fit      the setting fitted to this machine: devices, their speed, links, batch
compare_scale    links, batch and latencies that keep a full-size model's ratios of compute to traffic
compare_setting  a cluster with fewer devices, other links; what is left of it
compare_time     how many steps of a method there is time for
compare_layouts  how another framework would be set up there
compare_runs     one run of one method
compare_traffic  what a step sends, by the testbed's counters
compare_figures  rows, bounds, setting: what a comparison found
compare_bounds   what no method can pass
compare_picture  a bar for each method
outer_setup   what outer.yaml says, as the master takes it
outer_where   where the outer optimizer's master is, and the token to join it with
outer_serve   its master, or a shard, in this process
outer_household   processes that are started again when they end, and end together
outer_health    which of them run and do nothing
outer_up      master and shards on this machine
outer_run     become a cluster's command
outer_pipeline  a training run as one of its clusters
outer_place   where shards belong
outer_demo    the demonstration of the outer optimizer
outer_demo_orders      its places, links and numbers, and what each process is told
outer_demo_processes   its processes
outer_demo_roles       what each of them is
outer_demo_training    how a cluster of it trains
outer_demo_model       what it trains
outer_demo_record      what was heard of them: rows, curves, figures
outer_demo_picture     its losses as a picture
demo        all of it in one go, on the demonstration's cluster
worker      serve one device of this machine to a coordinator
reporter    what a use case tells the person who waits
tensorboard a run's scalars as TensorBoard events
cache       where results that are worth keeping between runs lie, and by what code they were made
"""
