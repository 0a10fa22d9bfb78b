"""The second way to cut: each unit runs the model's own forward, in which the blocks of other units are stubs."""
