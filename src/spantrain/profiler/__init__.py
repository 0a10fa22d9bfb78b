"""Measuring: what devices compute and what links carry (SpanTrain, section 3.2.1).

compute  seconds of F, I and W of each class of units, over micro-batch sizes
tasks    capacity score of a device, from small common tasks
network  latency and bandwidth of each pair of devices, through the training's own transport
"""
