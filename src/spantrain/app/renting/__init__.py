"""What to rent: offers in, machines with a plan, hours and dollars out.

`candidates` says what machines there could be, `search` plans for the promising ones and says what spot machines lose,
`choice` which is taken and what is shown, `picture` draws time against money.
Not here: reading offers (`config.prices`), planning itself (`planner`), what a step costs (`cost.money`).
To add another sort of machines to look at: yield its candidates in `candidates`, try them in `search`.
"""
