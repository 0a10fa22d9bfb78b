"""What people would use instead, on our workers: the same units, data, emulated devices and network.

Not here: how it is set up and compared (`spantrain_studies.comparison`).
To add a framework: a runner beside `whole` and `stages`.
"""
