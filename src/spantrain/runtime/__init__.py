"""The wall clock's driver of the policies, and the processes around it: one coordinator, one process for each device.

Not here: decisions (`schedule.dispatch`, `adaptation`), what a stage computes (`models.execution`).
To add an order to workers: its type in `control.orders`, and who does it in `worker.perform`.
"""
