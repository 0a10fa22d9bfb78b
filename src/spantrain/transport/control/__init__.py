"""Control plane: small messages between a coordinator and its workers, over gRPC with mutual TLS.

Not here: what the messages mean (`runtime.coordinator`).
To add a call: a handler; who calls is read from the certificate.
"""
