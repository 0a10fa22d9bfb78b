"""Planners that divide a graph of devices: groups as unlike as the machines and links are."""
