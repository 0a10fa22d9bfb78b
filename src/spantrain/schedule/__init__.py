"""Orders of work as data, checks of them, and the machines that decide what a replica does next.

Not here: seconds (`cost`, `sim`).
To add a static schedule: one file in `static`, or a package with the entry point `spantrain.schedules`.
"""
