"""The planner of Metis (Um et al., USENIX ATC 2024), by its paper.

Not here: its code.
Kept and not kept: `strategy`.
"""
