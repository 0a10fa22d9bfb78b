"""What surrounds one device's part in a run: its device, and its ways to the coordinator and to the others."""

import time
from collections.abc import Callable, Sequence

from spantrain.adaptation.registry import LocalAdapters
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.records import Record
from spantrain.core.units import UnitGraph
from spantrain.devices.base import ComputeDevice
from spantrain.runtime.control.plane import ControlPlane
from spantrain.runtime.control.requests import ReadClock, Ready
from spantrain.runtime.gradients.groups import StageGroups
from spantrain.runtime.recorder import StepRecorder
from spantrain.runtime.step.work import Feed
from spantrain.transport.connection.peers import PeerAddress
from spantrain.transport.mailbox.mailbox import MailboxLike

OpenGroups = Callable[[Plan, int, bool], StageGroups]
"""(plan, stage, whether replicas take statistics together) -> the groups of this device there, when all of its devices
have met."""


class WorkerLinks(Record):
    """A device and how it reaches the others: by the coordinator, by messages, by groups."""

    name: str
    device: ComputeDevice
    mailbox: MailboxLike
    control: ControlPlane
    check_abort: Callable[[], None]
    """Raises when what is under way is over."""
    open_groups: OpenGroups


class WorkerContext(WorkerLinks):
    """What one device has throughout a run, whichever plan runs."""

    graph: UnitGraph
    job: TrainJob
    feed: Feed
    recorder: StepRecorder
    adapters: LocalAdapters
    """What follows its links, plan after plan."""


def admit(control: ControlPlane, mailbox: MailboxLike, generation: int, peers: Sequence[PeerAddress]) -> None:
    """Admit the peers of an order, and dial them when they have done the same."""
    mailbox.set_peers(generation, seen_here(mailbox, peers), dial=False)
    control.ask(Ready())
    mailbox.dial()


def seen_here(mailbox: MailboxLike, peers: Sequence[PeerAddress]) -> list[PeerAddress]:
    """Return peers as a mailbox that is one of them reaches them."""
    own = next((peer for peer in peers if peer.name == mailbox.name), mailbox.address)
    return [peer.seen_from(own) for peer in peers]


def clock_offset_s(control: ControlPlane) -> float:
    """Return what is added to this machine's monotonic clock to get the coordinator's (best of five)."""
    samples = []
    for _ in range(5):
        sent_s = time.monotonic()
        now_s = control.ask(ReadClock()).now_s
        received_s = time.monotonic()
        samples.append((received_s - sent_s, now_s - (sent_s + received_s) / 2))
    round_trip_s, offset_s = min(samples)
    # Processes of one machine share the clock; an offset within the measuring error is none.
    return 0.0 if abs(offset_s) <= round_trip_s else offset_s
