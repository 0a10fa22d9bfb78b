"""An emulated wide-area network on one machine (DESIGN section 7).

Not here: emulated devices (`devices`), and traffic for measurements (the studies).
To add a property of links: `shaper` decides, `Link` of `core.cluster` names it.
"""
