"""What SpanTrain is compared with and studied by; imports `spantrain`, is imported by none of it, ships apart.

Not here: anything that a user of the program needs.
To add a study: a folder here, a script in benchmarks/ that prints its figures.
"""
