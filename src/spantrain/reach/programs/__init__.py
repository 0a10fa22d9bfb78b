"""Programs that are sent to other machines as text, and run there by any Python from 3.6 on.

Not here: whoever sends them (`reach.machines`) and reads their answers (`reach.facts`, `reach.pairs`, `reach.kept`).
To add a program: a file that needs nothing of SpanTrain and prints JSON.
"""
