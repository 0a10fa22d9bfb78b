"""A run whose devices leave, join and are lost: how it goes on, with which plan, and after its coordinator's end.

Not here: who is lost, and who keeps what (`recovery`); how state moves (`runtime.worker`).
To add a way to go on, give `carry_on` another leg; what one knows of a run is in `carry_on.Leg`.
"""
