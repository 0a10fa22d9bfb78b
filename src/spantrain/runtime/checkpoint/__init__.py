"""Checkpoints that outlive the plan: safetensors by the unsplit model's names, a manifest, a marker of the newest.

Not here: when to save (`runtime.coordinator`), and other layouts (`app.weights`).
Each file operation is a call of `tensor_file.Disk`, so that a test can end the program between any two.
"""
