"""`spantrain outer`: its verbs, their options and what people see of them.

Not here: the use cases (`app.outer`).
To add a verb: a function in `outer`.
"""
