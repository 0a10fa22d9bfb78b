"""Wires: messages of tensors between devices, over ZeroMQ or inside one process.

interface   what a mailbox takes and gives: addresses, messages, limits, counters
keys        CURVE key pairs
wire        the bytes of the protocol: encode, decode, check every bound
exchange    the queues between the threads that send and receive and the one that owns the sockets
outbox      the sending side of one peer: queue, lanes, credit, what is not acknowledged
inbox       the receiving side of one peer: put chunks together, grant credit, know what was seen
links       the connections to one peer, dialled or accepted
admission   who may connect: the answering side of ZeroMQ's authentication
visitors    what connections to the listening side came to: those cut off are counted
listener    the listening side: who comes in, and which route is whose
sender      what goes out on a link, and in which order
receiver    what comes in on a link, handed to the exchange
loop        the one thread that owns every socket, and the links that this side dials
mailbox     what the runtime uses
memory      the same mailbox inside one process, for tests
"""
