"""The outer optimizer's decisions: who pushes what where and when, and what makes a new version.

master      all of it together: events in, commands out
fragments   the masters of a model in fragments, as one
traffic     which pushes and pulls may begin, are whole, or come to nothing
client      a cluster's side of the protocol
round_steps when a cluster pushes: at its round's end, or at another's
stages      when the stages of a pipeline that is a cluster push and take versions
settings    its numbers, and what is kept over a restart
rule        how far a step goes
clusters    who is registered, and what outlives them
members     who is there, and who has not been heard of for too long
trainers    who trains, and who only looks on
shards      which shards are ready, and from which version they go on
stuck       which shards answer and move no layers
exchanges   pushes and pulls under way, layer by layer
transfers   which layer goes next, so that no shard is crowded while another idles
rounds      an update over all shards, all or nothing
updates     the window before it, and what is decided by it
weighing    what each push of a window weighs, and what part of a step the window is
overdue     whether something comes later than its last intervals let expect
guard       which pseudo-gradients are left out
chunks      who trains on which part of the data
layout      which layers each shard holds
placement   at which place the shards should be
"""
