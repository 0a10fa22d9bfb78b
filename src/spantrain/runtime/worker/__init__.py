"""One device's process: joins, carries out orders one by one, trains its part of a plan, leaves.

Not here: its steps (`runtime.step`).
To add an order: `runtime.control.orders` has its type, `perform` does it.
"""
