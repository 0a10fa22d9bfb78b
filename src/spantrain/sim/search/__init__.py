"""The order of work that `critical-path` follows, found by simulating many.

Not here: the devices and cuts of a plan (`planner`).
To add an improvement: `improve`.
"""
