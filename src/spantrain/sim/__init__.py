"""The virtual-clock driver of the dispatch policies: the same machines as the runtime's, on made-up time.

Not here: costs (`cost`), files (`app.simulation`).
To add a bound: prove it in its docstring in `bounds`, and take the largest of all. To add an effect: `costs` for its
seconds, `engine` for its events.
"""
