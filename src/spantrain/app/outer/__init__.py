"""Master and shards of an outer.yaml as processes: started, watched, started again, taken down; who joins, and how.

Not here: what they do once they run (`outer`).
To add a verb of `spantrain outer`: a file here, a command in `cli.commands.outer`.
"""
