"""What changes when the network does: pure decisions, each with its reason.

local       in mid-step, one device by itself: other micro-batches, messages in pieces
auto_local  the same for `auto`: as fine as slow links let work be
boundary    between steps, for all devices: another plan of the same devices
candidates  which plans are looked at
search      the plan for links as they are, by simulating
watch       what links give beside what was expected of them
pace        how long a sample takes over a link: now, and in the calmest step
state       how fast links are, as a part of what the plan was made for
choice      the adapters by name
paper       SpanTrain's three strategies, as a baseline
"""
