"""Bytes on the wire since a session began; a mailbox counts on through all its sessions."""

from collections.abc import Callable

from spantrain.transport.mailbox.interface import MailboxLike, PeerCounters


class Traffic:
    """What went to each peer and came from it since this was made."""

    def __init__(self, mailbox: MailboxLike) -> None:
        self._mailbox = mailbox
        self._before = mailbox.counters().peers

    def sent(self) -> dict[str, int]:
        """Return what went to each peer."""
        return self._since(lambda counters: counters.wire_bytes_sent)

    def received(self) -> dict[str, int]:
        """Return what came from each peer."""
        return self._since(lambda counters: counters.wire_bytes_received)

    def _since(self, value: Callable[[PeerCounters], int]) -> dict[str, int]:
        none = PeerCounters()
        now = self._mailbox.counters().peers
        return {name: value(counters) - value(self._before.get(name, none)) for name, counters in now.items()}
