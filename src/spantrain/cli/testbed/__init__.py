"""`spantrain testbed`: its verbs and what people see of them.

Not here: the network itself (`testbed`).
To add a verb: a function in `testbed`.
"""
