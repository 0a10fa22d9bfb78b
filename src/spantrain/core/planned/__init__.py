"""What goes with a plan: the order of work that it asks for, and what is said of it.

Not here: the plan itself (`core.plan`).
"""
