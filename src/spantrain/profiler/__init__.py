"""Measuring: what devices compute and what links carry (SpanTrain, section 3.2.1).

compute          seconds of F, I and W of each class of units, over micro-batch sizes
tasks            capacity score of a device, from small common tasks
network          who measures with whom and when; latency and bandwidth of a pair, through the training's own transport
network_probes   the two sides of a measurement: questions and answers
network_latency  pings, less what the software of both ends takes
network_rates    bandwidth from the arrivals of a load's pieces
"""
