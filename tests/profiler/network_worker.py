"""One side of a measurement in a process of its own; keys and orders come by standard input.

The side that listens answers until it is ended.
"""

import json
import sys

import torch

from spantrain.profiler.network import echo_probes, measure_pair, measure_round_trip
from spantrain.transport.connection.keys import KeyPair
from spantrain.transport.mailbox.interface import PeerAddress
from spantrain.transport.mailbox.mailbox import Mailbox


def main() -> None:
    torch.set_num_threads(1)
    setup = json.loads(sys.stdin.readline())
    mailbox = Mailbox(name=setup["name"], bind=setup["bind"], keypair=KeyPair(**setup["keys"]))
    mailbox.set_peers(0, [PeerAddress(**setup["peer"])])
    if setup["bind"]:
        echo_probes(mailbox, should_stop=lambda: False)
    for line in sys.stdin:
        order = json.loads(line)
        felt_s = measure_round_trip(mailbox, setup["peer"]["name"], rounds=order["rounds"]).felt_s
        link = measure_pair(mailbox, **order)
        print(json.dumps([vars(link), felt_s]), flush=True)
    mailbox.close()


if __name__ == "__main__":
    main()
