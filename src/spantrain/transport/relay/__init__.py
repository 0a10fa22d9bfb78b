"""Ways to machines that can only dial out: a relay, and the tunnels that they keep open to it.

Not here: what goes through, which is encrypted between its own two ends (`mailbox`, `control`).
To add a limit for each token: a field of `server.RelayLimits`, kept by its account.
"""
