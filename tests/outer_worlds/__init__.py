"""Made-up worlds for the outer optimizer, from its decisions alone up to real processes' parts.

members, policy, training: the policies alone, members that hold no numbers, messages that the caller moves
rounds: policies and real shards, in step; clients, stages: real clients and a made-up network, with faults on demand
shards, links, masters: real shards, links, a real master, each with made-up others
"""
