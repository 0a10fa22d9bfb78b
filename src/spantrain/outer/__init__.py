"""The cross-cluster outer optimizer: clusters that train whole copies and never wait for each other.

numerics   pseudo-gradients, their sums of squares, weighted mean, Nesterov step
snapshots  versions of a shard that outlive it
cluster    where a cluster's round began, and a new version under what it did since
push_rounding  a push in fewer bytes, and what rounding takes from it
shard      what a shard holds, and what it does at the master's commands
shard_server   a shard as it runs: layers in and out, commands, snapshots, coming back after loss
shard_snapshots  the thread that writes versions down beside all else
link       a shard's or a cluster's connection to the master
codec      events and commands as plain values, and back
link_session   one connection of it: calls that are numbered, and begun again when an answer was lost
master_server  the master: gRPC around its desk, a clock, its folder
master_desk    who enters, what is heard, what follows from it
master_members who is connected, and who must know whose address
master_outbox  what waits for a member
master_checks  who may join as what, which model fits, who may say what
master_config  what a master is told when it starts
master_files   what outlives it
master_rates   how fast layers go
master_status  what it tells of itself
master_report  how that is put together
optimizer  what a training loop calls after each step: the outer optimizer of a cluster
grouping   which layer a parameter is of, by its name
leases     a cluster's chunks of data, and the order of samples in them
local      a master and its shards in this process
fragment_rounds    the rounds of all fragments of a cluster's model
fragment_sessions  what the leader hears, for the session of the fragment that it is of
client_rounds      what a cluster's processes do between two steps, all at once
client_watch       says when versions do not come, and what for
client_session     what the leader hears of the master and the wire, and gets done
client_hands       the thread that does it
client_parameters  parameters, wherever they are: copies out, changes in
client_ranks       how processes of a cluster agree
client_data        batches of leased samples
client_metrics     what it did, and where its time went
client_connect     how it is connected
client_environment what `spantrain outer run` tells it
stage_leader  the stage of a pipeline that speaks for its cluster
stage_worker  one that only moves its own layers
stage_copy    what each does with its parameters at the leader's order
stage_connect how they are connected
"""
