"""The cross-cluster outer optimizer: clusters that train whole copies and never wait for each other.

Not here: its messages (`core.outer`), its wires (`transport.layers`), its processes on a machine (`app.outer`).
To add a decision: `policy`, pure; to add a way to connect: `client`.
"""
