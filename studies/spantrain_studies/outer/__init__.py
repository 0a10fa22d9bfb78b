"""The outer optimizer's own master and clients in a virtual world, beside other ways to train over clusters.

Not here: the live ones (`spantrain.outer`).
To add a method: `methods`.
"""
