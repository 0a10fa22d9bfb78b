"""An emulated wide-area network on one machine (DESIGN section 7).

testbed.py       what users call: up, attach, popen, shape, status, down
status.py        what it answers: hosts, links, what they carried
entrance.py      how a process moves itself to a host; also the script that `popen` goes through
layout.py        addresses; what the router is told
router.py        the process that holds and carries everything; its keeper, which clears up behind it
build.py         namespaces, switches, veth pairs, TUN devices, port rates
namespaces.py    the system calls for that
forwarding.py    packets from site to site
lines.py         the links between sites and the uplinks and downlinks that they share: pure as well
wakeups.py       wake at an instant, not some time after it
packets.py       what the router reads in a packet
shaper.py        rate, delay, jitter, loss, fair queue: pure, with the time as an argument
control.py       requests to the router over its socket
state.py         what is on disk about running testbeds
inhabitants.py   the processes that live in the namespaces: find and end them
traffic.py       measure it from inside: TCP rate over time, round trips
load.py          competing traffic between two hosts
"""
