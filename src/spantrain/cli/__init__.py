"""The program: parse, call a use case, show what came out. It starts without torch.

Not here: any decision.
To add a command: a function in `commands`, its use case in `app`, a line in `main`.
"""
