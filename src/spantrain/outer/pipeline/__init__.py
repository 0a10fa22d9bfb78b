"""A pipeline of several devices as one cluster: its leader decides, its stages move their own layers.

Not here: what a stage trains (`runtime`).
To add an order to stages: `core.outer.stages`, carried out in `copy`.
"""
