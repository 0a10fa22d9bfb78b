"""Static schedules: orders that are known before the step begins, one file for each, or for those alike but a constant.

Not here: what they are made of (`schedule.orders`).
To add one: a file with `SCHEDULES`, a tuple of `RegisteredSchedule`; `schedule.registry` finds it.
"""
