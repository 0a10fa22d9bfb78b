"""What people would use instead, on our workers: the same units, data, emulated devices and network.

order          what a worker is asked to run, and what it answers
session        one worker's part: its group, its steps, its figures
step_end       after the backward pass: norm, clipping, update
whole          the model in one piece on every device: torch's DistributedDataParallel and fully_shard
timed_units    a chain of units that takes an emulated device's time, each when its turn comes
scatter        sums to their holders beside the backward pass, which Gloo has no operation for
stages         the model in stages: torch.distributed.pipelining's schedules
timed_stage    a stage of theirs that takes an emulated device's time
held           bytes that samples in flight hold
reference      the same steps in one process: the losses that all others must have
"""
