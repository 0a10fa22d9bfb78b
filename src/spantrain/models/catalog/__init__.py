"""Models by name, from transformers' configurations with random weights.

Not here: models that users bring (`models.tracing`).
To add one: a row in `catalog`.
"""
