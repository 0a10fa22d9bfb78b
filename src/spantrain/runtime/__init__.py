"""The live runtime: the wall clock's driver of the policies, and the processes around it.

The coordinator's side

coordinator     who is here, what each is to do, what became of it
roster          what it knows of each worker
worker_desk     what workers call: what each may say, and what it is told
meeting         where the replicas of a stage meet
training_run    what workers ask of the run that is under way
barrier         the end of a step: all reports in, one verdict out
outer_meetings  where stages meet before and behind all steps, for an outer optimizer
advice          asks for a better plan beside training, and takes the answer at a barrier
launcher        starts this machine's workers, notices when one ends
nursery         the process that forks them, and takes them along when it ends
checkpoint      files of tensors by the unsplit model's names, and a manifest that is written last

The worker's side

worker          joins, carries out orders one by one, leaves
worker_settings what a worker is told when it starts
watch           what ends an order before it is done, and every wait in it
connections     TCP connections that a library holds, found and cut
stores          where devices of a stage meet before they form groups
failure         what it tells of an order that failed
own_functions   users' functions for data and loss: only those that a worker was started with
trainer         one device's part of a training run
own_part        all that it has of the plan that runs
switch_plan     what a change of plan asks of each device: a pure plan
switch          goes over to another plan between two steps
stage_member    its groups, its units with the part of their parameters that it holds
stage_actions   its actions in a step: those that its policy wants, or those that its leader tells
driver          drives one replica's policy: asks it, computes, sends, receives
stale_driver    the same of two steps at once
stale_session   a part of a training run whose steps overlap
stale_weights   two sets of weights, for even and for odd steps
following       how the members of a tensor-parallel replica do the same in the same order
work            what every member does for an action, and for how long
inbox           samples that have arrived, in pieces, until an action takes them
rounding        what a cut's wire format does to tensors that are sent
feed            reads samples where they are needed
given           batches that a user's own loop gives: a desk for it, a feed for devices
exchange        who gives whom which blocks of tensors: a pure plan
exchange_transfer  carries it out between devices
posts           how its messages go: through a driver, or a bare mailbox
emulation       the time that an emulated device takes
groups          the groups of a stage's devices that compute or sum together
memory_groups   the same among threads, for tests
gradients       sums over replicas, and the norm
background_sums the sums of one step, begun while its last backward runs
background      a thread that does pieces of work in order
part_sums       tensors that a group divides, gradients mostly, put together and taken apart again
outer_part      its part in an outer optimizer, where the whole run is one of its clusters
outer_layers    which layers of it each stage moves, and who holds their parameters
outer_parameters  a stage's parameters whole, whichever devices hold them
tied            sums of parameters that several stages hold copies of
traffic         bytes on the wire since a session began
scaling         the loss scale of float16 on one device
optimizer       AdamW and SGD, learning rates, clipping
recorder        what a device did, when and why
memory          the most that a run took on its device

Both

compare         other frameworks on our workers, for a comparison
orders          what the coordinator asks of a worker, and what it answers
environment     the one place that reads environment variables
"""
