"""The planner of Sailor (Strati et al., SOSP 2025, section 4.2).

Not here: its simulator.
Kept and not kept: `strategy`.
"""
