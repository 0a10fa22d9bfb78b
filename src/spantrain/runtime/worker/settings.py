"""What a worker is told when it starts; free of torch, so that the launcher may read it."""

from spantrain.core.records import Record
from spantrain.transport.control.address import Address
from spantrain.transport.relay.protocol import RelayAccess


class WorkerSettings(Record):
    """What a worker is told when it starts."""

    join: str
    """The coordinator's HOST:PORT or unix:/path."""
    token: str
    name: str
    """Of the device in the cluster file."""
    backend: str
    """What computes (`devices.registry`)."""
    data_address: str = "127.0.0.1"
    """Address on which the others reach this worker's mailbox."""
    listen_address: str = ""
    """Of this machine, where it listens, if that is elsewhere: others may reach it by a translated address."""
    or_join: tuple[str, ...] = ()
    """Where a coordinator may be started in the place of that one."""
    relay: RelayAccess | None = None
    """Through which those of other sites reach it, where they have no way to its address."""
    encrypted: bool = True
    functions: tuple[str, ...] = ()
    """The user's functions for model, data and loss that it may call, as `FILE.py:FUNCTION`."""
    folder: str = ""
    """Below which this machine keeps its part of checkpoints; empty: where the coordinator's machine has its own."""
    leave_s: float = 25.0
    """How long a worker that is to leave may take to hand over what it holds."""
    keep_s: float = 0.0
    """How long what is held of a run is kept for a coordinator that is lost to come back."""

    @property
    def listens_at(self) -> Address:
        """Where it listens for others, on any port."""
        return Address(host=self.listen_address or self.data_address)
