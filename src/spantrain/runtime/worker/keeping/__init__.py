"""Copies of what other devices hold: for the loss of those, and ahead of a change of plan.

Not here: who keeps what (`recovery.protection`), what is worth going ahead (`app.planning.ahead`).
To add what is copied otherwise: `copying` sends any tensors beside steps, `stage_copy` does the updates of a stage.
"""
