"""The process that builds the namespaces, holds them open and carries each packet when its link lets it.

Not here: what users call (`testbed.testbed`).
To add a property of links: `shaper`.
"""
