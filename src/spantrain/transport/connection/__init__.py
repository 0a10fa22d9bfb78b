"""What both ZeroMQ planes stand on: links between peers and the one thread that owns their sockets.

Not here: what is carried (`mailbox`, `layers`).
To add a plane: a subclass of `loop.ConnectionLoop`, with frames of its own that hold `bounds`.
"""
