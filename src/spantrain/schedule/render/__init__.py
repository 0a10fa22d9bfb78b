"""Orders and traces as text, SVG and Perfetto files.

Not here: tables for terminals (`cli.render`).
To add a form: a function from orders or a trace to text.
"""
