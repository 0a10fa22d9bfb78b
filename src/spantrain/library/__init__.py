"""The way in from Python, for people with a loop of their own; `import spantrain` offers all of it, and loads it late.

Not here: use cases (`app`).
To add a public name: here, in `spantrain.__init__` and its stub, and in docs/library.md.
"""
