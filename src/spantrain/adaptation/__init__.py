"""What changes when the network does, as pure decisions with a reason each: in mid-step by each device (`local`),
between steps by the coordinator (`boundary`).

Not here: what carries them out (`runtime`, `sim`), and how the micro-batches of a step may be cut anew
(`schedule.dispatch.recut`).
To add an adapter: a class in a file of its own, and its name in `registry`.
"""
