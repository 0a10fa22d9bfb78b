"""Connections to the master: events that arrive once and in order, and their bytes.

Not here: layers of parameters (`transport.layers`).
To add a message: a type in `core.outer`; `codec` follows its fields.
"""
