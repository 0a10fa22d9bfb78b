"""A worker: joins the coordinator with one device, carries out its orders one by one, and leaves."""

import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed import Store

from spantrain.config.files.json_codec import from_json, to_json
from spantrain.core.outer.stages import StageMeeting
from spantrain.core.plan import Plan
from spantrain.devices.base import ComputeDevice
from spantrain.devices.registry import open_device
from spantrain.errors import Interrupted, PeerLostError, SpanTrainError, WorkerError
from spantrain.profiler.compute import Bench, measure_tasks, measure_units
from spantrain.profiler.network import Software, dismiss_echo, echo_probes, measure_both
from spantrain.profiler.network_probes import warm_up_links
from spantrain.runtime.checkpoint.saver import SavedFile
from spantrain.runtime.comparison.order import FrameworkOrder
from spantrain.runtime.comparison.session import FrameworkSession
from spantrain.runtime.gradients.groups import StageGroups, hold_store, open_groups, reach_store
from spantrain.runtime.launch.launcher import WorkerSettings
from spantrain.runtime.staleness.session import session_of
from spantrain.runtime.step.emulation import law_of
from spantrain.runtime.worker.failure import told
from spantrain.runtime.worker.trainer import Colleagues
from spantrain.runtime.worker.user_functions import with_own_functions
from spantrain.runtime.worker.watch import Standing, Watch, connections, cut
from spantrain.runtime.worker.worker_protocol import (
    ComputeOrder,
    ComputeResult,
    ConnectOrder,
    DeviceReport,
    EchoOrder,
    LinkOrder,
    LinkResult,
    OuterCall,
    PeerEntry,
    StepVerdict,
    TrainOrder,
)
from spantrain.transport.control.client import ControlClient
from spantrain.transport.control.heartbeat import HeartbeatThread
from spantrain.transport.mailbox.mailbox import Mailbox

_log = logging.getLogger(__name__)

ORDER_TYPES: Mapping[str, type] = {
    "compute": ComputeOrder,
    "connect": ConnectOrder,
    "echo": EchoOrder,
    "framework": FrameworkOrder,
    "link": LinkOrder,
    "train": TrainOrder,
}
_HEARTBEAT_S = 0.3
_LOOK_S = 0.25  # how often one who waits for the coordinator looks whether the order is still wanted
_CALL_S = 600.0
"""The longest that one call may take, far more than the coordinator holds any: waits end by the watch."""
_GOODBYE_S = 1.0
_LAST_WORDS_S = 30.0  # for a process that cannot go on, to say so and to end by itself
_COLLECTIVE_TIMEOUT_S = 300.0
"""How long a device waits for another of its stage that lives; the watch ends a wait for one that does not."""


class Worker:
    """One device's process."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._groups: list[StageGroups] = []  # that were opened for the order under way
        self._before: frozenset[tuple[int, str]] | None = None  # sockets from before the first of them, if any
        self._fault: str | None = None  # what has ended a thread that this process cannot do without
        self._dismissed = False  # whether the coordinator has no more orders
        self._stopped: str | None = None  # why this process is to end by itself
        self._is_watched = False
        torch.set_num_threads(1)

    def run(self) -> None:
        """Join, work, leave; returns when the coordinator has no more orders.

        Raises:
            PeerLostError: the coordinator was lost, or has ended what was under way.
            Interrupted: it was stopped.
        """
        settings = self._settings
        open_device(settings.backend)  # a device that is not there must be told before joining
        with contextlib.ExitStack() as stack:
            self._client = ControlClient.join(settings.join, settings.token, name=settings.name, facts={})
            stack.callback(self._client.close)
            self._name = str(self._client.welcome["device"])
            self._heartbeats = HeartbeatThread(
                self._client,
                interval_s=_HEARTBEAT_S,
                # Neither side gives up on a silent network before the other.
                timeout_s=float(self._client.welcome["patience_s"]),
                on_change=self._hear,
            )
            self._watch = stack.enter_context(Watch(self._standing, interrupt=self._interrupt, give_up=_give_up))
            bind = f"tcp://{settings.data_address}:0"
            self._mailbox = Mailbox(name=self._name, bind=bind, encrypted=settings.encrypted, died=self._cannot_go_on)
            stack.callback(self._mailbox.close)
            self._software = Software(self._mailbox)
            self._heartbeats.start()
            stack.callback(self._heartbeats.stop)
            self._is_watched = True
            try:
                self._ask("introduce", {"endpoint": self._mailbox.endpoint, "public_key": self._mailbox.public_key})
                self._serve()
            except BaseException as error:
                self._say_goodbye(error)
                if self._stopped is not None:
                    raise Interrupted(f"{self._name}: {self._stopped}; its name is free") from None
                raise

    def stop(self) -> bool:
        """Have it end soon, from a signal's handler; return whether it will: not before it has joined.

        It looks by itself: an exception out of a handler may leave a lock of gRPC's locked for ever.
        """
        self._stopped = "it was stopped on its machine" if self._is_watched else None
        return self._is_watched

    def _say_goodbye(self, error: BaseException) -> None:
        """Have the name freed at once for another worker."""
        self._heartbeats.stop()  # one that comes behind the goodbye would be refused, and taken for a loss
        if self._dismissed or self._heartbeats.coordinator_lost is not None:
            return
        why = self._stopped or str(error) or type(error).__name__
        with contextlib.suppress(SpanTrainError):
            self._client.call("leave", {"reason": why}, timeout_s=_GOODBYE_S)

    def _serve(self) -> None:
        """Carry out one order after another.

        Raises:
            WorkerError, PeerLostError: the last one failed, here or elsewhere; or the coordinator is lost.
        """
        last = -1
        done: dict[str, Any] = {}
        while (answer := self._next_order({**done, "after": last}))["kind"] != "leave":
            last = answer["id"]
            done = {"done": last, **self._carry_out(answer["kind"], answer)}
        self._dismissed = True
        if done.get("caused_elsewhere"):
            reason = answer["reason"] if last <= answer["ended_orders"] else done["error"]
            raise PeerLostError(f"the run was ended: {reason}")
        if "error" in done:
            raise WorkerError(done["error"])

    def _next_order(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Tell what became of the last order, and wait for the next; `leave` if none will come."""
        try:
            return self._ask("next_order", payload)
        except PeerLostError:
            standing = self._standing()
            if standing.leave:
                return {"kind": "leave", "ended_orders": standing.ended_orders, "reason": standing.reason}
            raise

    def _standing(self) -> Standing:
        return Standing.of(self._heartbeats.answer, self._heartbeats.coordinator_lost or self._stopped)

    def _hear(self) -> None:
        """Pass on what a heartbeat has brought; called in the thread of heartbeats."""
        self._mailbox.wake()
        self._watch.news()

    def _interrupt(self) -> None:
        """End what waits inside of torch for devices of a stage, whose order is over."""
        while self._groups:
            self._groups.pop().abort()
        if self._before is not None:
            cut(self._before)

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

    def _carry_out(self, kind: str, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Do one order; return its result, or the error for the coordinator to name."""
        order_id = answer["id"]
        self._watch.begin(order_id)
        try:
            order = self._with_own_functions(from_json(ORDER_TYPES[kind], answer["body"], f"order {kind}"))
            return {"result": to_json(self._perform(order))}
        except Exception as error:  # noqa: BLE001 - a worker's outermost loop: the coordinator names whatever it is
            # What fails because the order is over says nothing of why.
            cause = self._watch.cause() or error
            _log.error("order %s failed: %s", kind, cause if cause is not error else traceback.format_exc())
            return told(cause)
        finally:
            self._watch.end()
            self._groups, self._before = [], None

    def _with_own_functions(self, order: object) -> object:
        own = self._settings.functions
        match order:
            case ComputeOrder() | FrameworkOrder():
                return replace(order, model=with_own_functions(order.model, own))
            case TrainOrder():
                return replace(order, plan=replace(order.plan, model=with_own_functions(order.plan.model, own)))
        return order

    def _perform(self, order: object) -> object:
        match order:
            case ComputeOrder():
                return self._measure_compute(order)
            case ConnectOrder():
                self._admit(order.generation, order.peers)
                warm_up_links(self._mailbox, [peer.name for peer in order.peers if peer.name != self._name])
                return {}
            case EchoOrder():
                self._admit(order.generation, order.peers)
                echo_probes(self._mailbox, should_stop=self._order_over, software=self._software)
                return {}
            case LinkOrder():
                return self._measure_link(order)
            case FrameworkOrder():
                return FrameworkSession(
                    order,
                    self._name,
                    open_device(self._settings.backend),
                    meet=self._meet,
                    check_abort=self._check,
                    begin=self._begin,
                    progress=self._progress,
                ).run()
            case TrainOrder():
                device = open_device(self._settings.backend)
                return session_of(order, self._name, device, self._colleagues(device)).run()
        raise AssertionError(f"no such order: {order}")

    def _admit(self, generation: int, peers: tuple[PeerEntry, ...]) -> None:
        """Admit the peers of an order, and dial them when they have done the same."""
        self._mailbox.set_peers(generation, [peer.address for peer in peers], dial=False)
        self._ask("ready", {})
        self._mailbox.dial()

    def _measure_compute(self, order: ComputeOrder) -> ComputeResult:
        place = order.cluster.device_by_name[self._name]
        device = open_device(self._settings.backend)
        law = law_of(order.cluster, place.name, order.dtype)
        bench = Bench(
            device=device,
            spec=order.model,
            graph=order.graph,
            kind=place.kind,
            dtype=order.dtype,
            emulate=law.seconds if law else None,
        )
        timings = measure_units(bench, order.sizes, on_progress=self._progress)
        score = measure_tasks(device, name=place.name, law=law)
        return ComputeResult(timings=timings, score=score, real_compute_ratio=device.real_compute_ratio)

    def _measure_link(self, order: LinkOrder) -> LinkResult:
        self._admit(order.generation, order.peers)
        links = measure_both(
            self._mailbox,
            order.target,
            max_payload_bytes=order.max_payload_bytes,
            rounds=order.rounds,
            expected_bytes_per_s=order.expected_bytes_per_s,
            software=self._software,
        )
        dismiss_echo(self._mailbox, order.target)
        return LinkResult(links=links)

    def _progress(self, done: int, total: int, text: str) -> None:
        self._ask("progress", {"done": done, "total": total, "text": text})

    def _order_over(self) -> bool:
        """Whether the coordinator has ended this order (echoing) or is lost."""
        return self._watch.cause() is not None

    def _colleagues(self, device: ComputeDevice) -> Colleagues:
        return Colleagues(
            mailbox=self._mailbox,
            admit=self._admit,
            commit_step=self._commit_step,
            open_groups=lambda plan, stage_index: self._open_groups(plan, stage_index, device),
            checkpoint_saved=self._checkpoint_saved,
            meet_stages=self._meet_stages,
            ask_given=lambda question: self._ask("given", question),
            check_abort=self._check,
            begin=self._begin,
            clock_offset_s=self._clock_offset_s(),
        )

    def _ask(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Return the coordinator's answer; ask again while it says to, and while the network is away.

        Whatever is asked may be asked twice: an answer may be lost on its way.

        Raises:
            RemoteRefusal: the coordinator refuses.
            PeerLostError, Interrupted: it is lost, or has ended the order under way.
        """
        while True:
            try:
                answer = self._answer(method, payload)
            except PeerLostError:
                self._check()
                self._heartbeats.await_loss(_HEARTBEAT_S)
            else:
                if not answer.get("again"):
                    return answer
                self._check()

    def _answer(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        done = threading.Event()
        call = self._client.begin(method, payload, timeout_s=_CALL_S, done=done.set)
        try:
            while not done.wait(_LOOK_S):
                self._check()
        finally:
            call.cancel()
        return call.result()

    def _begin(self) -> None:
        self._ask("begin", {})

    def _commit_step(self, report: DeviceReport) -> StepVerdict:
        answer = self._ask("commit_step", to_json(report))
        return from_json(StepVerdict, answer, "verdict")

    def _meet_stages(self, call: OuterCall) -> StageMeeting:
        return from_json(StageMeeting, self._ask("meet_stages", to_json(call)), "meeting of stages")

    def _checkpoint_saved(self, saved: SavedFile) -> tuple[int, ...]:
        return tuple(int(step) for step in self._ask("checkpoint_saved", to_json(saved))["dropped"])

    def _open_groups(self, plan: Plan, stage_index: int, device: ComputeDevice) -> StageGroups:
        """Meet the other devices of a stage, if it has any."""
        stage, store = plan.stages[stage_index], None
        if len(stage.devices) > 1:
            store = self._meet(plan.generation, stage_index, stage.devices[0] == self._name)
        groups = open_groups(
            plan,
            stage_index,
            self._name,
            store=store,
            torch_device=device.torch_device,
            timeout_s=_COLLECTIVE_TIMEOUT_S,
        )
        self._groups.append(groups)
        return groups

    def _meet(self, generation: int, stage: int, leads: bool) -> Store:
        """Meet the other devices of a stage at a store that the first one holds."""
        if self._before is None:
            self._before = connections()
        place = {"generation": generation, "stage": stage}
        if leads:
            store = hold_store(self._settings.data_address)
            self._ask("meeting_point", {**place, "host": self._settings.data_address, "port": store.port})
            return store
        answer = self._ask("meeting_point", place)
        return reach_store(str(answer["host"]), int(answer["port"]))

    def _clock_offset_s(self) -> float:
        """Return what is added to this machine's monotonic clock to get the coordinator's (best of five)."""
        samples = []
        for _ in range(5):
            sent_s = time.monotonic()
            answer = self._ask("clock", {})
            received_s = time.monotonic()
            samples.append((received_s - sent_s, float(answer["now_s"]) - (sent_s + received_s) / 2))
        round_trip_s, offset_s = min(samples)
        # Processes of one machine share the clock; an offset within the measuring error is none.
        return 0.0 if abs(offset_s) <= round_trip_s else offset_s


def _give_up(cause: str) -> None:
    """End this process, in which something waits that cannot be ended otherwise."""
    sys.stderr.write(f"Error: {cause}\n")
    sys.stderr.flush()
    os._exit(1)
