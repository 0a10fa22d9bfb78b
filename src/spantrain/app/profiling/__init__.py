"""Measure a cluster for a model, or describe it by data sheets where nothing was measured.

Not here: the measuring itself (`profiler`).
To add a measurement: `profiler` takes it, `profile` asks for it.
"""
