"""What things cost in seconds, bytes, money and energy: the only place where time is computed (DESIGN house rule 4).

Not here: anything with an order of work in it (`sim`), or a choice (`planner`).
To add a cost: a function of a profile; constants with their source.
"""
