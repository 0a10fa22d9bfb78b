"""The same training by other frameworks and other planners, in turn, on one emulated setting (`spantrain compare`).

Not here: what runs on a worker (`runtime.comparison`).
To add a method: `methods` names it, `layouts` sets it up.
"""
