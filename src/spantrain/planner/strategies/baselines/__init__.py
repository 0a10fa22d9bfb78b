"""What people do without a planner: one device, one site, data parallelism, equal layers.

Not here: planners of other systems (the studies).
To add one: a file here, a row in the registry.
"""
