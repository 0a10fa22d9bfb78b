"""What master, shards and clusters of the outer optimizer say to each other, and plans that it joins.

Not here: who says what when (`outer.policy`).
To add a message: a dataclass in `events` (who may say it) or `commands` (whom it is for); the codec follows its fields.
"""
