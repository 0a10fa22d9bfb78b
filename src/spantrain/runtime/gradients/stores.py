"""Where devices of a stage meet before they form groups: a store that the first of them holds."""

import datetime
import socket

from torch.distributed import Store, TCPStore

from spantrain.errors import PeerLostError

_REACH = datetime.timedelta(seconds=30)
"""How long to try to reach a store that is open."""


def hold_store(address: str) -> TCPStore:
    """Open a store on a free port of one address only; left alone, torch would listen on all of the machine's."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        listener.listen()
        port = listener.getsockname()[1]
        return TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=_REACH,
            master_listen_fd=listener.detach(),
        )


def reach_store(host: str, port: int) -> Store:
    """Connect to a store that another device holds.

    Raises:
        PeerLostError: it does not answer.
    """
    try:
        return TCPStore(host, port, is_master=False, timeout=_REACH)
    except RuntimeError as error:
        raise PeerLostError(f"the first device of this stage does not answer at {host}:{port}: {error}") from error
