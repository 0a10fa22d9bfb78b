"""Who is here, what each is to do, and what became of it: membership, the barrier at a step's end, calls of workers.

Not here: the wire under it (`transport.control`).
Who takes part is state (`roster`); what becomes of a run that loses a device is the policy of `recovery`.
"""
