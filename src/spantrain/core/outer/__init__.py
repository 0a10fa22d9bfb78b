"""What master, shards and clusters of the outer optimizer say to each other, and plans that it joins.

Not here: who says what when (`outer.policy`).
To add a message: a dataclass in `events` or `commands`; the codec follows its fields.
"""
