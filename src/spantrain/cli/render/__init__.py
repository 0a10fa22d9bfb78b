"""What a person sees: live progress on standard error, tables and pictures in text on standard output.

Not here: numbers that the use case did not compute.
To add a table: a function that takes a result and a console.
"""
