"""`spantrain outer demo`: four unequal places on an emulated network train one model and never wait for each other.

Not here: anything that other commands use.
Each process of it reads one line of JSON that says what to be (`roles`).
"""
