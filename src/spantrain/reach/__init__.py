"""Other machines before any worker runs there: who they are, and how a small program gets to them and back.

Not here: what is made of the answers (`app.machines`), and what workers say to one another (`transport`).
To add a way to a machine: a case of `machines.Machine.command`, and who its machines are in `allocations`.
"""
