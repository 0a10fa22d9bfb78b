"""Steps that overlap, with weights one step old.

Not here: what to do next in them (`schedule.dispatch.policies`).
To add a step more: not foreseen.
"""
