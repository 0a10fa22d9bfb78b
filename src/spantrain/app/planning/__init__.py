"""Plan files with their profiles, what limits a plan, and what would help.

Not here: the search for plans (`planner.engine`).
To add a what-if: a changed profile or plan in `explain`, which simulates it again.
"""
