"""Plan files with their profiles, what limits a plan, and what would help.

Not here: the search for plans (`planner.engine`).
To add a what-if: a function in `what_if`, a row in `explain`.
"""
