"""A live run beside its prediction.

Not here: measured runs of other frameworks (the studies).
To add a figure: `validate_run`, and `cli.render.validation`.
"""
