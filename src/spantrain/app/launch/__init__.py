"""Ways to start a run's workers on other machines, with the code of their user: what `spantrain launch` does.

Not here: reaching one machine (`reach`), and what a worker does (`runtime.worker`).
To add a way: a `way.LaunchWay`, and an option of it in `cli.commands.launch`.
"""
