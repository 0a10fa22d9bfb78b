"""What changes when the network does: pure decisions, each with its reason.

local       in mid-step, one device by itself: other micro-batches, messages in pieces
boundary    between steps, for all devices: another plan of the same devices
candidates  which plans are looked at
state       how fast links are, as a part of what the plan was made for
choice      the adapters by name
paper       SpanTrain's three strategies, as a baseline
"""
