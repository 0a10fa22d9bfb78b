"""Use cases: inputs in, a result dataclass out; the command line and the library call them in the same way.

Not here: parsing and printing (`cli`), planning itself (`planner`), processes and wires (`runtime`, `transport`).
To add one: a file in the folder of its verb, which reports progress to a `Reporter`.
"""
