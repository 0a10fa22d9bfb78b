"""Models by name, from transformers' configurations with random weights.

Not here: models that users bring (`models.tracing`).
To add a family: its sizes and names of units in `catalog`, its units in a class beside those of `text` or `images`.
"""
