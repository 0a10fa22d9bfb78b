"""What things cost, as files and sites say it.

Not here: reading prices (`config.prices`), reckoning with them (`cost.money`).
To add a price: a field with its unit in its name, its key in `config.prices`, and what it costs in `cost.money`.
"""
