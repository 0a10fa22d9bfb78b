"""A worker: joins the coordinator with one device, carries out orders one by one, says what became of them, leaves."""

import contextlib
import itertools
import logging
import os
import sys
import threading
import time
import traceback
from dataclasses import replace

import torch
from torch.distributed import DistError

from spantrain.config.files.json_codec import from_json, to_json
from spantrain.devices.registry import open_device
from spantrain.errors import Interrupted, PeerLostError, ProtocolError, SpanTrainError, UsageError, WorkerError
from spantrain.models.tracing.factory import what_was_raised
from spantrain.recovery.detection import HEARTBEAT_S
from spantrain.runtime.control import requests
from spantrain.runtime.control.plane import ControlPlane
from spantrain.runtime.worker.perform import OrderRunner, order_kind
from spantrain.runtime.worker.settings import WorkerSettings
from spantrain.runtime.worker.watch import Watch, standing_of, unreached
from spantrain.transport.control.address import Address, address_towards
from spantrain.transport.control.client import ControlClient
from spantrain.transport.control.heartbeat import HeartbeatThread
from spantrain.transport.control.protocol import RemoteRefusal
from spantrain.transport.mailbox.interface import Counters
from spantrain.transport.mailbox.mailbox import Mailbox
from spantrain.transport.relay.tunnel import TunnelEnd, tunnel

_MODEL = "spantrain/models/tracing/unit.py"
"""Where the model's own code is called."""
_ENVIRONMENT = ("alloc", "out of memory", "gloo", "NCCL", "CUDA error", "cuDNN", "cuBLAS")
"""In texts of torch's RuntimeErrors that are no error of a program: memory, network, driver."""
_MEMORY = ("allocate memory", "out of memory", "ALLOC_FAILED")
"""Of those, what says that memory did not suffice."""


def told(error: BaseException) -> requests.OrderFailure:
    """Return what the coordinator is told of an error."""
    own, short = isinstance(error, SpanTrainError), _out_of_memory(error)
    text = str(error) if own else f"{type(error).__name__}: {error}"
    if not own and not short and _in_the_model(error):
        text = f"the model's own code failed on these samples: {what_was_raised(error)}"
    return requests.OrderFailure(
        error=text,
        caused_elsewhere=isinstance(error, (PeerLostError, Interrupted)),
        usage=isinstance(error, UsageError),
        internal=not own and not _in_the_model(error) and not _of_the_environment(error),
        out_of_memory=short,
    )


def _in_the_model(error: BaseException) -> bool:
    """Whether it was raised in code of the model's: at the end of the calls from a unit, not in the unit itself."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return any(file.endswith(_MODEL) for file in files[:-1]) and not files[-1].endswith(_MODEL)


def _out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _MEMORY)


def _of_the_environment(error: BaseException) -> bool:
    if isinstance(error, (OSError, MemoryError, DistError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _ENVIRONMENT)


_log = logging.getLogger(__name__)
_GOODBYE_S = 1.0
_LAST_WORDS_S = 30.0
"""How long a process that cannot go on may take to say so and to end by itself."""
JOIN_S = 600.0
"""How long a coordinator that is not there yet is waited for; as long as one waits for its workers."""
_PLACE_S = 3.0
"""How long it is looked for at one of several places."""
_AGAIN_S = 1.0
"""Between two attempts to join a coordinator again that has not noticed yet that it has lost this worker."""


class Worker:
    """One device's process."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._fault: str | None = None  # what has ended a thread that this process cannot do without
        self._dismissed = False  # whether the coordinator has no more orders
        self._stopped: str | None = None  # why this process is to end by itself
        self._to_stop = threading.Event()
        self._leaving = ""  # why it is to leave behind a step
        self._is_watched = False
        self._tunnel = contextlib.ExitStack()  # by which a relay has others reach the mailbox
        self._asked_reach = 0  # the last question of that
        torch.set_num_threads(1)

    @property
    def name(self) -> str:
        """The device that it stands for."""
        return self._name if self._is_watched else self._settings.name

    @property
    def held(self) -> requests.HeldState | None:
        """What it holds of a run, if anything; asked in any thread."""
        return self._orders.held if self._is_watched else None

    def counters(self) -> Counters | None:
        """Return what went to and came from others; None before it has joined. Asked in any thread."""
        return self._mailbox.counters() if self._is_watched else None

    def run(self) -> None:
        """Join, work, leave; returns when the coordinator has no more orders.

        Raises:
            PeerLostError: the coordinator was lost, or has ended what was under way.
            Interrupted: it was stopped.
        """
        settings = self._settings
        open_device(settings.backend)  # a device that is not there must be told before joining
        with contextlib.ExitStack() as stack:
            self._join(JOIN_S)
            stack.callback(lambda: self._client.close())
            stack.callback(self._tunnel.close)
            self._listen()
            stack.callback(lambda: self._mailbox.close())
            self._orders = OrderRunner(
                self._name, settings, control=self._control, mailbox=self._mailbox, check_abort=self._check
            )
            self._watch = stack.enter_context(Watch(self._standing, interrupt=self._orders.interrupt, give_up=_give_up))
            self._is_watched = True
            while self._take_part():
                pass

    def _listen(self) -> None:
        encrypted, bind = self._settings.encrypted, f"tcp://{self._settings.listens_at}"
        self._mailbox = Mailbox(name=self._name, bind=bind, encrypted=encrypted, died=self._cannot_go_on)

    def _join(self, timeout_s: float) -> None:
        self._client = self._joined(timeout_s)
        welcome = from_json(requests.WorkerWelcome, self._client.welcome, "welcome", error=ProtocolError)
        self._name = welcome.device
        self._heartbeats = HeartbeatThread(
            self._client,
            interval_s=HEARTBEAT_S,
            # Neither side gives up on a silent network before the other.
            timeout_s=welcome.patience_s,
            on_change=self._hear,
        )
        self._heartbeats.leaving = self._leaving
        self._control = ControlPlane(
            self._client, check=self._check, pause=lambda: self._heartbeats.await_loss(HEARTBEAT_S)
        )

    def _joined(self, timeout_s: float) -> ControlClient:
        """Join at the first place where the coordinator is; raises what was said there, or last if it is at none."""
        settings, deadline_s = self._settings, time.monotonic() + timeout_s
        places = (settings.join, *settings.or_join)
        for place in itertools.cycle(places):
            left_s = deadline_s - time.monotonic()
            is_last = place == places[-1] and left_s <= len(places) * _PLACE_S
            try:
                return ControlClient.join(
                    place,
                    settings.token,
                    name=settings.name,
                    facts={},
                    timeout_s=left_s if len(places) == 1 else _PLACE_S,
                    cancelled=self._to_stop,
                )
            except PeerLostError:
                if len(places) == 1 or is_last or self._to_stop.is_set():
                    raise
            except UsageError:  # another run's coordinator is there
                if place == places[-1]:
                    raise
        raise AssertionError("there is a place")

    def _introduction(self) -> requests.Introduction:
        """Return how others reach the mailbox, through a tunnel as long as it is there if it needs one."""
        near, relay = self._mailbox.endpoint, self._settings.relay
        told = f"tcp://{replace(Address.parse(near.removeprefix('tcp://')), host=self._settings.data_address)}"
        relayed = ""
        if relay is not None:
            ends = [TunnelEnd(at=Address.parse(near.removeprefix("tcp://")))]
            relayed = f"tcp://{self._tunnel.enter_context(tunnel(relay, ends))[0]}"
        return requests.Introduction(
            endpoint=relayed or (told if self._settings.listen_address else near),
            public_key=self._mailbox.public_key,
            near=near if relayed or self._settings.listen_address else "",
            held=self._orders.held,
        )

    def _take_part(self) -> bool:
        """Carry out orders until there are no more; return whether to go on, under a coordinator that has come back."""
        heartbeats = self._heartbeats
        heartbeats.start()
        try:
            self._control.ask(self._introduction())
            self._serve()
        except BaseException as error:
            self._say_goodbye(error)
            if self._stopped is not None:
                raise Interrupted(f"{self._name}: {self._stopped}; its name is free") from None
            # The coordinator is lost, or it, or another in its place, knows this worker no more.
            gone = isinstance(error, PeerLostError) and heartbeats.coordinator_lost is not None
            if self._fault is not None or not (self._keeps and (gone or isinstance(error, RemoteRefusal))):
                raise
            self._come_back(error)
            return True
        finally:
            heartbeats.stop()
        return False

    @property
    def _keeps(self) -> bool:
        """Whether this worker keeps what it holds of a run, if anything yet, for a coordinator that comes back."""
        return self._settings.keep_s > 0 and self._orders.has_part

    def _come_back(self, lost: BaseException) -> None:
        """Join again, with what is held.

        Raises:
            PeerLostError: the coordinator did not come back in time.
            Interrupted: this worker was stopped meanwhile.
        """
        keep_s, deadline_s = self._settings.keep_s, time.monotonic() + self._settings.keep_s
        _log.warning(
            "%s: %s; what it holds is kept for %.0f s, for the coordinator to come back", self._name, lost, keep_s
        )
        self._client.close()
        told = ""
        while True:
            try:
                self._join(max(_AGAIN_S, deadline_s - time.monotonic()))
            except (RemoteRefusal, PeerLostError, UsageError) as error:
                if self._stopped is not None:
                    raise Interrupted(f"{self._name}: {self._stopped}") from None
                if time.monotonic() > deadline_s:
                    raise PeerLostError(f"{lost}; it did not come back within {keep_s:.0f} s: {error}") from None
                if told != str(error):
                    told = str(error)
                    _log.warning("%s: %s; it goes on asking", self._name, told)
                self._to_stop.wait(_AGAIN_S)
            else:
                self._orders.control = self._control
                self._listen_anew()
                _log.warning("%s: the coordinator is back", self._name)
                return

    def _listen_anew(self) -> None:
        """Have a mailbox that knows no generation: those of a coordinator that begins with a checkpoint may be older.

        It is elsewhere, if this machine has the address no more at which it was.
        """
        settings = self._settings
        try:
            settings.listens_at.check_free()
        except UsageError:
            gone, here = settings.listens_at.host, address_towards(self._client.address)
            _log.warning("%s: %s is no address of this machine any more; listens at %s now", self._name, gone, here)
            translated = bool(settings.listen_address)  # what others dial stays then
            moved = replace(settings, listen_address=here) if translated else replace(settings, data_address=here)
            self._settings = self._orders.settings = moved
        self._mailbox.close()  # before the tunnel: its goodbyes go through
        self._tunnel.close()
        self._listen()
        self._orders.mailbox = self._mailbox

    def leave(self, why: str) -> bool:
        """Have it leave behind a step, with what it holds given to others; return whether it will.

        It is stopped where that takes too long, and at once where it holds nothing of a run. Called from a signal's
        handler, or any thread.
        """
        if not self._is_watched or self._orders.held is None:
            return self.stop()
        if not self._leaving:
            self._leaving = self._heartbeats.leaving = why
            _log.warning("%s is to leave: %s; it hands over what it holds first", self._name, why)
            limit = threading.Timer(self._settings.leave_s, self.stop)
            limit.daemon = True
            limit.start()
        return True

    def stop(self) -> bool:
        """Have it end soon, from a signal's handler; return whether it will: not before it has joined.

        It looks by itself: an exception out of a handler may leave a lock of gRPC's locked for ever.
        """
        self._stopped = "it was stopped on its machine" if self._is_watched else None
        if self._is_watched:
            self._to_stop.set()
        return self._is_watched

    def _say_goodbye(self, error: BaseException) -> None:
        """Have the name freed at once for another worker."""
        self._heartbeats.stop()  # one that comes behind the goodbye would be refused, and taken for a loss
        if self._dismissed or self._heartbeats.coordinator_lost is not None:
            return
        why = self._stopped or str(error) or type(error).__name__
        with contextlib.suppress(SpanTrainError):
            self._client.call(requests.Goodbye.wire_name, to_json(requests.Goodbye(reason=why)), timeout_s=_GOODBYE_S)

    def _serve(self) -> None:
        """Carry out one order after another.

        Raises:
            WorkerError, PeerLostError: the last one failed, here or elsewhere; or the coordinator is lost.
            Interrupted: this worker was stopped under one.
        """
        outcome: requests.OrderOutcome | None = None
        while (answer := self._next_order(outcome)).order is not None:
            outcome = self._carry_out(answer.order)
            if self._stopped is not None and outcome.failure is not None:
                raise Interrupted(self._stopped)  # with its goodbye it is lost: others may fail for its sake
        self._dismissed = True
        self._orders.dismissed()
        failure = outcome.failure if outcome else None
        if outcome is None or failure is None:
            return
        if failure.caused_elsewhere:
            was_ended = outcome.order_id <= answer.standing.ended_orders
            raise PeerLostError(f"the run was ended: {answer.standing.reason if was_ended else failure.error}")
        raise WorkerError(failure.error)

    def _next_order(self, outcome: requests.OrderOutcome | None) -> requests.NextOrder:
        """Tell what became of the last order, and wait for the next."""
        try:
            return self._control.ask(requests.AskForOrder(after=outcome.order_id if outcome else -1, outcome=outcome))
        except PeerLostError:
            standing = self._standing()
            if standing.leave:
                return requests.NextOrder(standing=standing)
            raise

    def _standing(self) -> requests.Standing:
        found = standing_of(self._heartbeats.answer, self._heartbeats.coordinator_lost or self._stopped)
        return replace(found, comes_back=self._stopped is None and self._keeps)

    def _hear(self) -> None:
        """Pass on what a heartbeat has brought; called in the thread of heartbeats."""
        self._mailbox.wake()
        self._control.wake()
        self._watch.look_again()
        asked = self._standing().asks_reach
        if asked > self._asked_reach:
            threading.Thread(target=self._tell_reach, args=(asked,), name="reach", daemon=True).start()
        self._asked_reach = asked

    def _tell_reach(self, number: int) -> None:
        """Tell the coordinator which peers that are dialled cannot be reached."""
        with contextlib.suppress(SpanTrainError):  # the order may be over by then
            self._control.ask(requests.Reach(number=number, unreached=unreached(self._mailbox.dialled)))

    def _cannot_go_on(self, fault: str) -> None:
        """Have the process end, with the order under way if that notices, and else all the same."""
        self._fault = fault
        _log.error("%s cannot go on: %s", self._name, fault)
        end = threading.Timer(_LAST_WORDS_S, os._exit, (WorkerError.exit_code,))
        end.daemon = True
        end.start()

    def _check(self) -> None:
        """Raise what ends the order under way: a thread that has ended here, a lost coordinator, its word."""
        if self._fault is not None:
            raise WorkerError(f"{self._name}: {self._fault}")
        self._watch.check()

    def _carry_out(self, given: requests.GivenOrder) -> requests.OrderOutcome:
        """Do one order; return its result, or the error for the coordinator to name."""
        self._watch.begin(given.order_id)
        try:
            order = from_json(order_kind(given.name), given.body, f"order {given.name}", error=ProtocolError)
            return requests.OrderOutcome(
                order_id=given.order_id, result=to_json(self._orders.perform(order, self._watch))
            )
        except Exception as error:  # noqa: BLE001 - a worker's outermost loop: the coordinator names whatever it is
            # What fails because the order is over says nothing of why.
            cause = self._watch.cause() or error
            failure = told(cause)
            is_known = isinstance(cause, SpanTrainError) or _of_the_environment(cause)
            _log.error("order %s failed: %s", given.name, cause if is_known else traceback.format_exc())
            if self._is_watched:
                failure = replace(failure, unfinished=self._orders.unfinished, holds=self._orders.is_whole)
            return requests.OrderOutcome(order_id=given.order_id, failure=failure)
        finally:
            self._watch.begin(None)


def _give_up(cause: str) -> None:
    """End this process, in which something waits that cannot be ended otherwise."""
    sys.stderr.write(f"Error: {cause}\n")
    sys.stderr.flush()
    os._exit(1)
