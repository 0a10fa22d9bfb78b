"""The planner of Asteroid (Ye et al., MobiCom 2024, sections 3.2 and 3.3).

Not here: its recovery.
Kept and not kept: `strategy`.
"""
