"""What becomes of a run when a device is lost or fails, as pure decisions.

Not here: who notices (`runtime.coordinator`), and which plan would run on other devices (`planner`).
To add a policy: a class in a file of its own that keeps to `policy.RecoveryPolicy`; the coordinator is given one.
"""
