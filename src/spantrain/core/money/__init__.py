"""Prices: of a site's devices and of bytes that leave it (`prices`), of kinds everywhere and of offers (`offers`).

Not here: reading them (`config.prices`), reckoning with them (`cost.money`).
To add a price: a field with its unit in its name, its key in `config.prices`, and what it costs in `cost.money`.
"""
