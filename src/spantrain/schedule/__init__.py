"""Orders of work as data.

registry   names of the schedules, a line on each
layout     the spans and limits of a plan, and how far forwards must run ahead of a backward
orders     static orders (gpipe, 1f1b)
check      does an order do all work once, in an order that can run?
render     text timelines of orders and traces
perfetto   traces as one file that opens in Perfetto, and back
"""
