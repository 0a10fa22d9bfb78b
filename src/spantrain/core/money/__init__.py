"""Prices: of a site's devices and of bytes that leave it, of kinds everywhere, and offers of machines.

Here are the data only: `config.prices` reads them, `cost.money` reckons with them.
"""
