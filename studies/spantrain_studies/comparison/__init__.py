"""The same training by other frameworks and other planners, in turn, on one emulated setting (`spantrain compare`).

To add a method: `methods` names it, `layouts` sets it up, a runner in `worker` runs it.
"""
