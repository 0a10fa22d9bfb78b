"""Control plane: small messages between a coordinator and its workers, over gRPC with mutual TLS.

protocol      names, limits, options, and the envelope of an answer; RemoteRefusal
codec         dicts of plain values <-> msgpack bytes, strict in both directions
address       "HOST:PORT" and "unix:/path": parse, check that it is free, dial
token         the join token: a secret and the fingerprint of the coordinator's certificate
certificates  the coordinator's identity, the authority of a run, a worker's key and request
credentials   a coordinator's own, kept in a file for its next start
private_file  files that only their owner may read
members       who has joined, by certificate; how many calls each has running
guard         wrong tokens slowed down, refusals counted
desk          what the coordinator answers, without gRPC: JoinDesk and CallDesk
rpc           one gRPC server on one port, as the desks need it
server        ControlServer: two ports, a token, handlers
client        ControlClient: join, call, begin a call
heartbeat     FailureDetector (pure) and HeartbeatThread (of a worker)
"""
