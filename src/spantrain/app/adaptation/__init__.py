"""The adapter of a run, by a profile's costs: what follows the network while it trains, and plans anew beside it.

Not here: its decisions (`spantrain.adaptation`), and who carries them out (`runtime`).
To add a question that it asks of costs: `adapt` answers it.
"""
