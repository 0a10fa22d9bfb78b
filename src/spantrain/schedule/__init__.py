"""Orders of work as data.

registry   names of the schedules, a line on each
layout     the spans and limits of a plan, and how far forwards must run ahead of a backward
orders     static orders (gpipe, 1f1b in two forms, the original zero-bubble orders)
check      does an order do all work once, in an order that can run?
text       a whole order as text that parses back
render     text timelines of traces
svg        one step of a trace as a picture
perfetto   traces as one file that opens in Perfetto
"""
