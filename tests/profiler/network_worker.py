"""One side of a measurement in a process of its own; keys and orders come by standard input.

The side that listens answers until it is ended.
"""

import json
import statistics
import sys

import torch

from spantrain.profiler.network import Software, echo_probes, measure_directions
from spantrain.profiler.network_probes import Prober
from spantrain.transport.connection.peers import KeyPair, PeerAddress
from spantrain.transport.mailbox.mailbox import Mailbox


def main() -> None:
    torch.set_num_threads(1)
    setup = json.loads(sys.stdin.readline())
    mailbox = Mailbox(name=setup["name"], bind=setup["bind"], keypair=KeyPair(**setup["keys"]))
    mailbox.set_peers(0, [PeerAddress(**setup["peer"])])
    if setup["bind"]:
        echo_probes(mailbox, Software(mailbox).round_trip_s, should_stop=lambda: False)
    for line in sys.stdin:
        order = json.loads(line)
        prober = Prober(mailbox, setup["peer"]["name"], Software(mailbox).round_trip_s)
        felt_s = statistics.median(prober.ping(15)) / 2
        directions = {order["source"] == mailbox.name: None}
        (link,) = measure_directions(prober, directions, order["max_payload_bytes"], order["rounds"])
        print(json.dumps([vars(link), felt_s]), flush=True)
    mailbox.close()


if __name__ == "__main__":
    main()
