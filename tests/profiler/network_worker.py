"""One side of a measurement in a process of its own; keys and orders come by standard input.

The side that listens answers until it is ended.
"""

import json
import sys

import torch

from spantrain.profiler.network import echo_probes, measure_both
from spantrain.transport.keys import KeyPair
from spantrain.transport.mailbox import Mailbox, PeerAddress


def main() -> None:
    torch.set_num_threads(1)
    setup = json.loads(sys.stdin.readline())
    mailbox = Mailbox(name=setup["name"], bind=setup["bind"], keypair=KeyPair(**setup["keys"]))
    mailbox.set_peers(0, [PeerAddress(**setup["peer"])])
    if setup["bind"]:
        echo_probes(mailbox, should_stop=lambda: False)
    for line in sys.stdin:
        links = measure_both(mailbox, setup["peer"]["name"], **json.loads(line))
        print(json.dumps([vars(link) for link in links]), flush=True)
    mailbox.close()


if __name__ == "__main__":
    main()
