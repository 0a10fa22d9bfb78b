"""The virtual-clock driver of the dispatch policies.

clock      events in the order of their time
network    links that transfers share
speed      devices and links that become slower or faster
memory     bytes that devices hold over time
costs      seconds of actions, transfers and the end of a step
replica    one replica: its policy, what it runs and holds
record     intervals and flows of a simulated run
engine     runs a plan for a few steps
bound      seconds that no order of work can beat
"""
