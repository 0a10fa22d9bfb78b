"""Wires: messages of tensors between devices, over ZeroMQ or inside one process; control messages, over gRPC.

interface   what a mailbox takes and gives: addresses, messages, limits, counters
keys        CURVE key pairs
bounds      what decoders hold what came against: lists, numbers, texts; Refusal
wire        the bytes of the protocol: encode, decode, check every bound
exchange    the queues between the threads that send and receive and the one that owns the sockets
outbox      the sending side of one peer: queue, lanes, credit, what is not acknowledged
pace        how many bytes may be on their way to a peer: what its link takes at once
inbox       the receiving side of one peer: put chunks together, grant credit, know what was seen
links       the connections to one peer, dialled or accepted
admission   who may connect: the answering side of ZeroMQ's authentication
visitors    what connections to the listening side came to: those cut off are counted
listener    the listening side: who comes in, and which route is whose
sender      what goes out on a link, and in which order
receiver    what comes in on a link, handed to the exchange
threads     threads that others rely on: why one has ended before its time
waker       how other threads wake the one that owns the sockets
loop        the one thread that owns every socket, and the links that this side dials
mailbox     what the runtime uses
memory      the same mailbox inside one process, for tests
blockwise   numbers as small codes and a scale for each block of them
control     joining, calls and heartbeats, between one coordinator and its members
layers             layers of named parameters between shards and clusters: large frames, few copies
layers_interface   what a layer wire takes and gives: keys, limits, counters, what it tells its owner
layers_format      the bytes that it speaks: encode, decode, check every bound
layers_pool        memory of layers that is used again, and where each parameter lies in it
layers_copiers     threads that put in its place what comes
layers_arrivals    layers that come: only what is expected, as far as it was granted
layers_departures  layers that go
layers_link        the connections to one peer, dialled or come in
layers_host        the listening side: who may come, and whose each connection is
layers_loop        the one thread that owns every socket of a layer wire
"""
