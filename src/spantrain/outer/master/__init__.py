"""The master as a process: who may enter, what is heard and answered, what outlives it.

Not here: its decisions (`outer.policy`).
To add a figure to its status: `status` has the type, `report` fills it.
"""
