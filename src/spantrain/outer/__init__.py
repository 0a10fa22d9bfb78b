"""The cross-cluster outer optimizer: clusters that train whole copies and never wait for each other.

numerics   pseudo-gradients, their sums of squares, weighted mean, Nesterov step
snapshots  versions of a shard that outlive it
cluster    where a cluster's round began, and a new version under what it did since
shard      what a shard holds, and what it does at the master's commands
"""
