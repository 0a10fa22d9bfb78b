"""What becomes of a run when a device is lost or fails, as pure decisions.

Not here: who notices (`runtime.coordinator`), and which plan would run on other devices (`planner`).
To add a policy: a class like `policy.EndOnLoss` in a file of its own; the coordinator makes one for each set of orders.
"""
