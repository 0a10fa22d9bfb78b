"""What a plan or a schedule would do: time, memory, money, energy, also over links that change.

Not here: the event engine (`sim`).
To add a figure: compute it in `simulate`, show it in `cli.render`.
"""
