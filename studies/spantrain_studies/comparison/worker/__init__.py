"""What a worker runs of another framework, as an order that it is given (`spantrain.runtime.worker.perform`).

Not here: what gives the order, and what is made of its results (`comparison`).
"""
