"""A worker: joins the coordinator with one device, carries out its orders one by one, and leaves."""

import contextlib
import datetime
import logging
import os
import socket
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed import Store, TCPStore

from spantrain.config.artefacts import from_json, to_json
from spantrain.core.outer_stages import StageMeeting
from spantrain.core.plan import Plan
from spantrain.errors import Interrupted, PeerLostError, WorkerError
from spantrain.models.device import Device, open_device, real_compute_ratio
from spantrain.profiler.compute import Bench, measure_units
from spantrain.profiler.network import dismiss_echo, echo_probes, knock, measure_both
from spantrain.profiler.network_latency import Software
from spantrain.profiler.tasks import measure_tasks
from spantrain.runtime.checkpoint.saver import SavedFile
from spantrain.runtime.compare.order import FrameworkOrder
from spantrain.runtime.compare.session import FrameworkSession
from spantrain.runtime.emulation import law_of
from spantrain.runtime.failure import told
from spantrain.runtime.groups import StageGroups, open_groups
from spantrain.runtime.orders import (
    ComputeOrder,
    ComputeResult,
    ConnectOrder,
    EchoOrder,
    LinkOrder,
    LinkResult,
    OuterCall,
    PeerEntry,
    StepReport,
    TrainOrder,
    Verdict,
)
from spantrain.runtime.own_functions import with_own_functions
from spantrain.runtime.stale_session import session_of
from spantrain.runtime.trainer import Colleagues
from spantrain.runtime.worker_settings import WorkerSettings
from spantrain.transport.control.client import ControlClient
from spantrain.transport.control.heartbeat import HeartbeatThread
from spantrain.transport.mailbox import Mailbox

__all__ = ["ORDER_TYPES", "Worker"]

_log = logging.getLogger(__name__)

ORDER_TYPES: Mapping[str, type] = {
    "compute": ComputeOrder,
    "connect": ConnectOrder,
    "echo": EchoOrder,
    "framework": FrameworkOrder,
    "link": LinkOrder,
    "train": TrainOrder,
}
_LONG_POLL_S = 10.0
_HEARTBEAT_S = 0.3
_CALL_TIMEOUT_S = 30.0
_BARRIER_TIMEOUT_S = 600.0
_LAST_WORDS_S = 30.0
"""A process that cannot go on has so long to say so to the coordinator, and to end by itself."""
_COLLECTIVE_TIMEOUT_S = 300.0
"""How long a device waits for another of its stage; one that has ended or lost its network is noticed sooner."""


class Worker:
    """One device's process."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._fault: str | None = None
        """What has ended a thread that this process cannot do without."""
        torch.set_num_threads(1)

    def run(self) -> None:
        """Join, work, leave; returns when the coordinator has no more orders."""
        settings = self._settings
        open_device(settings.backend)  # a device that is not there must be told before joining
        self._client = ControlClient.join(settings.join, settings.token, name=settings.name, facts={})
        self._name = str(self._client.welcome["device"])
        self._mailbox = Mailbox(
            name=self._name,
            bind=f"tcp://{settings.data_address}:0",
            encrypted=settings.encrypted,
            died=self._cannot_go_on,
        )
        self._software = Software(self._mailbox)
        self._heartbeats = HeartbeatThread(
            self._client,
            interval_s=_HEARTBEAT_S,
            # Neither side gives up on a silent network before the other.
            timeout_s=max(settings.heartbeat_timeout_s, float(self._client.welcome["patience_s"])),
            on_change=self._mailbox.wake,
        )
        self._heartbeats.start()
        try:
            facts = {
                "endpoint": self._mailbox.endpoint,
                "public_key": self._mailbox.public_key,
                "backend": settings.backend,
            }
            self._client.call("introduce", facts, timeout_s=_CALL_TIMEOUT_S)
            self._serve()
        finally:
            self._heartbeats.stop()
            self._mailbox.close()
            self._client.close()

    def _serve(self) -> None:
        done: dict[str, Any] = {}
        while True:
            fault = self._fault  # after which the result is told, and no other order taken
            wait_s = 0.0 if fault else _LONG_POLL_S
            answer = self._client.call("next_order", {**done, "wait_s": wait_s}, timeout_s=wait_s + _CALL_TIMEOUT_S)
            if fault:
                raise WorkerError(f"{self._name}: {fault}")
            done = {}
            kind = answer.get("kind")
            if kind == "leave":
                return
            if kind is None:
                continue
            done = {"done": answer["id"], **self._carry_out(kind, answer)}

    def _cannot_go_on(self, fault: str) -> None:
        """Have the process end, with the order under way if that notices, and else all the same."""
        self._fault = fault
        _log.error("%s cannot go on: %s", self._name, fault)
        end = threading.Timer(_LAST_WORDS_S, os._exit, (WorkerError.exit_code,))
        end.daemon = True
        end.start()

    def _carry_out(self, kind: str, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Do one order; return its result, or the error for the coordinator to name."""
        order_id = answer["id"]
        try:
            order = self._with_own_functions(from_json(ORDER_TYPES[kind], answer["body"], f"order {kind}"))
            return {"result": to_json(self._perform(order, order_id))}
        except Exception as error:  # noqa: BLE001 - a worker's outermost loop: the coordinator names whatever it is
            _log.error("order %s failed:\n%s", kind, traceback.format_exc())
            return told(error)

    def _with_own_functions(self, order: object) -> object:
        own = self._settings.functions
        match order:
            case ComputeOrder() | FrameworkOrder():
                return replace(order, model=with_own_functions(order.model, own))
            case TrainOrder():
                return replace(order, plan=replace(order.plan, model=with_own_functions(order.plan.model, own)))
        return order

    def _perform(self, order: object, order_id: int) -> object:
        match order:
            case ComputeOrder():
                return self._measure_compute(order)
            case ConnectOrder():
                self._admit(order.generation, order.peers)
                knock(self._mailbox, [peer.name for peer in order.peers if peer.name != self._name])
                return {}
            case EchoOrder():
                self._admit(order.generation, order.peers)
                echo_probes(self._mailbox, should_stop=lambda: self._order_over(order_id), software=self._software)
                return {}
            case LinkOrder():
                return self._measure_link(order)
            case FrameworkOrder():
                return FrameworkSession(
                    order,
                    self._name,
                    open_device(self._settings.backend),
                    meet=self._meet,
                    check_abort=lambda: self._check_abort(order_id),
                    begin=self._begin,
                    progress=self._progress,
                ).run()
            case TrainOrder():
                device = open_device(self._settings.backend)
                return session_of(order, self._name, device, self._colleagues(order_id, device)).run()
        raise AssertionError(f"no such order: {order}")

    def _admit(self, generation: int, peers: tuple[PeerEntry, ...]) -> None:
        """Admit the peers of an order, and dial them when they have done the same."""
        self._mailbox.set_peers(generation, [peer.address for peer in peers], dial=False)
        self._client.call("ready", {}, timeout_s=_BARRIER_TIMEOUT_S)
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
        return ComputeResult(timings=timings, score=score, real_compute_ratio=real_compute_ratio(device))

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
        with contextlib.suppress(PeerLostError):
            self._client.call("progress", {"done": done, "total": total, "text": text}, timeout_s=_CALL_TIMEOUT_S)

    def _order_over(self, order_id: int) -> bool:
        """Whether the coordinator has ended this order (echoing) or aborted it."""
        return order_id <= int(self._heartbeats.answer.get("ended_orders", -1)) or self._lost() is not None

    def _lost(self) -> str | None:
        return self._heartbeats.coordinator_lost

    def _check_abort(self, order_id: int) -> None:
        lost = self._lost()
        if lost is not None:
            raise PeerLostError(lost)
        if order_id <= int(self._heartbeats.answer.get("ended_orders", -1)):
            raise Interrupted(str(self._heartbeats.answer.get("reason", "the coordinator ended this run")))

    def _colleagues(self, order_id: int, device: Device) -> Colleagues:
        return Colleagues(
            mailbox=self._mailbox,
            admit=self._admit,
            commit_step=self._commit_step,
            open_groups=lambda plan, stage_index: self._open_groups(plan, stage_index, device),
            checkpoint_saved=self._checkpoint_saved,
            meet_stages=self._meet_stages,
            ask_given=lambda question: self._client.call("given", question, timeout_s=_CALL_TIMEOUT_S),
            check_abort=lambda: self._check_abort(order_id),
            begin=self._begin,
            clock_offset_s=self._clock_offset_s(),
        )

    def _ask(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Ask what may be asked twice; again while the network is away, until the coordinator is taken for lost."""
        while True:
            try:
                return self._client.call(method, payload, timeout_s=_BARRIER_TIMEOUT_S)
            except PeerLostError:
                if self._heartbeats.await_loss(_HEARTBEAT_S):
                    raise

    def _begin(self) -> None:
        self._ask("begin", {})

    def _commit_step(self, report: StepReport) -> Verdict:
        answer = self._ask("commit_step", to_json(report))
        return from_json(Verdict, answer, "verdict")

    def _meet_stages(self, call: OuterCall) -> StageMeeting:
        return from_json(StageMeeting, self._ask("meet_stages", to_json(call)), "meeting of stages")

    def _checkpoint_saved(self, saved: SavedFile) -> tuple[int, ...]:
        answer = self._client.call("checkpoint_saved", to_json(saved), timeout_s=_CALL_TIMEOUT_S)
        return tuple(int(step) for step in answer["dropped"])

    def _open_groups(self, plan: Plan, stage_index: int, device: Device) -> StageGroups:
        """Meet the other devices of a stage, if it has any."""
        stage, store = plan.stages[stage_index], None
        if len(stage.devices) > 1:
            store = self._meet(plan.generation, stage_index, stage.devices[0] == self._name)
        return open_groups(
            plan,
            stage_index,
            self._name,
            store=store,
            torch_device=device.torch_device,
            timeout_s=_COLLECTIVE_TIMEOUT_S,
        )

    def _meet(self, generation: int, stage: int, leads: bool) -> Store:
        """Meet the other devices of a stage at a store that the first one holds."""
        patience = datetime.timedelta(seconds=_CALL_TIMEOUT_S)
        place = {"generation": generation, "stage": stage}
        if leads:
            store = _open_store(self._settings.data_address, patience)
            self._client.call(
                "meeting_point",
                {**place, "host": self._settings.data_address, "port": store.port},
                timeout_s=_CALL_TIMEOUT_S,
            )
            return store
        answer = self._client.call("meeting_point", place, timeout_s=_CALL_TIMEOUT_S)
        return TCPStore(answer["host"], int(answer["port"]), is_master=False, timeout=patience)

    def _clock_offset_s(self) -> float:
        """Return what is added to this machine's monotonic clock to get the coordinator's (best of five)."""
        best: tuple[float, float] | None = None
        for _ in range(5):
            sent_s = time.monotonic()
            answer = self._client.call("clock", {}, timeout_s=_CALL_TIMEOUT_S)
            received_s = time.monotonic()
            sample = (received_s - sent_s, float(answer["now_s"]) - (sent_s + received_s) / 2)
            best = sample if best is None else min(best, sample)
        assert best is not None
        round_trip_s, offset_s = best
        # Processes of one machine share the clock; an offset within the measuring error is none.
        return 0.0 if abs(offset_s) <= round_trip_s else offset_s


def _open_store(address: str, patience: datetime.timedelta) -> TCPStore:
    """Hold a meeting point on one address only; left alone, torch would listen on all of the machine's."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        listener.listen()
        port = listener.getsockname()[1]
        return TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=patience,
            master_listen_fd=listener.detach(),
        )
