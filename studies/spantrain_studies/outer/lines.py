"""Lines of members, shared by all that goes over them."""

from spantrain.sim.clock import VirtualClock
from spantrain.sim.network.network import Network
from spantrain.sim.network.sending import Arrived, TransferCost
from spantrain_studies.outer.case import OuterCase


class LineNetwork:
    """Carries messages from line to line; pairs share a line equally."""

    def __init__(self, clock: VirtualClock, case: OuterCase) -> None:
        self._network = Network(clock)
        self._lines = case.lines
        self._transfers: dict[tuple[str, str, int], TransferCost] = {}

    def send(self, source: str, target: str, size_bytes: int, arrived: Arrived) -> None:
        """Carry so many bytes; one message of a pair after the other."""
        key = source, target, size_bytes
        transfer = self._transfers.get(key)
        if transfer is None:
            transfer = self._transfers[key] = self._transfer(*key)
        self._network.send(source, target, transfer, arrived)

    def _transfer(self, source: str, target: str, size_bytes: int) -> TransferCost:
        ends = self._lines[source], self._lines[target]
        slower = min(end.bandwidth_bytes_per_s for end in ends)
        return TransferCost(
            size_bytes=size_bytes,
            latency_s=sum(end.latency_s for end in ends),
            occupancy_s=size_bytes / slower,
            links=(f"{source} up", f"{target} down"),
            usage=tuple(slower / end.bandwidth_bytes_per_s for end in ends),
        )
