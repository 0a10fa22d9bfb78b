"""The control plane of a run: what workers and their coordinator ask each other, typed, each name written once.

Not here: the wire under it (`transport.control`), and who answers (`runtime.coordinator`).
To add a request: its type in `requests`, and who answers it. To add an order: its type in `orders`, and who does it.
"""
