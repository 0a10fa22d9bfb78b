"""One device's process: joins, carries out orders one by one, trains its part of a plan, leaves.

Not here: its steps (`runtime.step`).
To add an order: `worker_protocol` has its type, `worker` does it.
"""
