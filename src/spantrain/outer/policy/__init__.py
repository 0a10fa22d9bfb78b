"""The outer optimizer's decisions: who pushes what where and when, and what makes a new version; no clock, no wire.

Not here: what carries them out (`outer.master`, `outer.shard`, `outer.client`).
To add a decision: a machine in a file of its own that `master` or `client` asks.
"""
