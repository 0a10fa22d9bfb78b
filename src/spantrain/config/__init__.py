"""Files <-> dataclasses: what a user or an earlier step wrote, read strictly and within bounds; no torch.

Not here: checks that need a model or a cost (`planner`, `app`).
To add a file: a reader on `files`, its types in `core`, its page in docs/artefacts.md.
"""
