"""A function for each command: typed options in, a use case called, its result rendered.

Not here: options that several commands share (`cli.options`).
To add one: a file here, a line in `cli.main`.
"""
