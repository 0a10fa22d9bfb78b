"""What both ZeroMQ wires are made of: keys, who may connect, bounds of decoders, threads that end loudly.

Not here: what is carried.
To add a bound: `bounds`.
"""
