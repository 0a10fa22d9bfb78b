"""The live runtime: the wall clock's driver of the policies, and the processes around it.

The coordinator's side

coordinator     who is here, what each is to do, what became of it
barrier         the end of a step: all reports in, one verdict out
launcher        starts this machine's workers, notices when one ends
nursery         the process that forks them, and takes them along when it ends
checkpoint      one file a stage, and a manifest that is written last

The worker's side

worker          joins, carries out orders one by one, leaves
worker_settings what a worker is told when it starts
trainer         one device's part of a training run
driver          drives one replica's policy: asks it, computes, sends, receives
inbox           samples that have arrived, in pieces, until an action takes them
rounding        what a cut's wire format does to tensors that are sent
feed            reads samples where they are needed
emulation       the time that an emulated device takes
gradients       sums over replicas, and the norm
optimizer       AdamW and SGD, learning rates, clipping
recorder        what a device did, when and why
memory          the most that a run took on its device

Both

orders          what the coordinator asks of a worker, and what it answers
control         the control plane between them: joining, calls, heartbeats
environment     the one place that reads environment variables
"""
