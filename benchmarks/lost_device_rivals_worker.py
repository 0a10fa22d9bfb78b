"""One process of `lost_device_rivals.py`: a device under torchft or TorchElastic, or what they meet at.

The device holds the whole model, and takes its part of each batch as its speed allows. Its units take an emulated
device's time, by the same law as SpanTrain's workers. What happens is written as lines of JSON into one file of the
run, each with the machine's clock.
"""

import argparse
import ctypes
import datetime
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Collection
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from spantrain.config.artefacts import read_profile
from spantrain.core.action import Op
from spantrain.core.job import TrainJob
from spantrain.core.profile import Profile
from spantrain.core.span import Span
from spantrain.models.build import build_units
from spantrain.models.data.dataset import open_dataset
from spantrain.models.units import Rows, rows_read
from spantrain.runtime.step.emulation import emulated_seconds
from spantrain.runtime.step.work import SampledFeed
from spantrain_studies.comparison.worker.device import StartedElsewhereDevice
from spantrain_studies.comparison.worker.reference import StepEnd
from spantrain_studies.comparison.worker.whole import TimedChain

BATCH, JOB = 48, TrainJob(steps=1000)
LOOPBACK = "127.0.0.1"
HEARTBEAT_TIMEOUT_MS, JOIN_TIMEOUT_MS, TICK_MS, HEARTBEAT_MS = 500, 5000, 10, 50
"""torchft's lighthouse and managers; its own defaults are 5000, 60000, 100 and 100."""
SUM_TIMEOUT_S, TIMEOUT_S = 0.25, 20.0
"""torchft's, of a sum, and of all else; its own default is 60. Those that are no neighbours of a lost device in Gloo's
ring learn of it by the first alone: of 1, 0.5 and 0.25 s four runs of four went to their end, and the shortest cost
least. On links slower than loopback it would break calm steps.
"""
RENDEZVOUS = {"last_call_timeout": 1, "keep_alive_interval": 1, "keep_alive_max_attempt": 3, "join_timeout": 120}
"""TorchElastic's, in whole seconds; its own defaults are 30, 5, 3 and 600. With two attempts, it loses survivors."""
MONITOR_S = 0.02
"""How often an agent looks after its worker; torchrun's default is 0.1."""
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have this process killed when the one that started it ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Diary:
    """Lines about what happened, of all processes of a run in one file."""

    def __init__(self, folder: Path, device: str) -> None:
        self._file = os.open(folder / "diary.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._device = device

    def say(self, what: str, **more: Any) -> None:
        """Add a line."""
        line = {"at_s": time.monotonic(), "device": self._device, "what": what, **more}
        os.write(self._file, (json.dumps(line) + "\n").encode())


def shares_of(profile: Profile, devices: Collection[str], batch: int) -> dict[str, Span]:
    """Divide a batch so that the slowest device is through as early as can be; each has one sample at least."""
    names = [name for name in profile.cluster.device_by_name if name in devices]
    laws = {name: emulated_seconds(profile.cluster, name, "float32", profile.graph.units) for name in names}

    def seconds(name: str, samples: int) -> float:
        return sum(laws[name](op, samples) or 0.0 for op in (Op.FORWARD, Op.BACKWARD))

    counts = dict.fromkeys(names, 1)
    for _ in range(batch - len(names)):
        counts[min(names, key=lambda name: seconds(name, counts[name] + 1))] += 1
    ends = [sum(list(counts.values())[: number + 1]) for number in range(len(names))]
    return {name: Span(end - counts[name], end) for name, end in zip(names, ends, strict=True)}


class WholeModel:
    """The model in one piece on an emulated device, with its data and its optimizer."""

    def __init__(self, profile: Profile, device: str) -> None:
        """Build it; all devices build the same."""
        self.devices = list(profile.cluster.device_by_name)
        self.own = self.devices.index(device)
        units = build_units(profile.model, seed=JOB.seed)
        self._reads = rows_read(units)
        self._feed = SampledFeed(open_dataset(profile.model), global_batch=BATCH, seed=JOB.order_seed)
        laws = [emulated_seconds(profile.cluster, device, "float32", [unit]) for unit in profile.graph.units]
        self.chain = TimedChain(units, StartedElsewhereDevice(), [partial(_of_law, law) for law in laws])
        self.end = StepEnd(JOB, list(self.chain.parameters()))
        self._shares = cache(lambda present: shares_of(profile, present, BATCH)[device])

    def rows(self, step: int, present: Collection[str]) -> tuple[Rows, int]:
        """Return the own part of a step's batch, with these devices; and how many samples that is."""
        span = self._shares(frozenset(present))
        return self._feed.rows(step, span, self._reads), span.size

    def mark(self) -> Tensor:
        """Return a one in this device's place; summed over those that take part, it tells who does."""
        return torch.eye(len(self.devices))[self.own]

    def state(self) -> dict[str, Any]:
        """Return parameters and the optimizer's state."""
        return {"model": self.chain.state_dict(), "optimizer": self.end.optimizer.state_dict()}

    def take(self, state: Any) -> None:
        """Take them over."""
        self.chain.load_state_dict(state["model"])
        self.end.optimizer.load_state_dict(state["optimizer"])


def _of_law(law: Callable[[Op, int], float | None], op: Op, samples: int) -> float:
    seconds = law(op, samples)
    assert seconds is not None, "all devices are emulated"
    return seconds


class _Errors(logging.Handler):
    """Notes when torchft catches an error of a sum, or of what comes before it."""

    def __init__(self, diary: Diary) -> None:
        super().__init__(logging.WARNING)
        self._diary = diary

    def emit(self, record: logging.LogRecord) -> None:
        if "got exception" in record.getMessage():
            self._diary.say("known", text=record.getMessage()[-200:])


def torchft_device(folder: Path, name: str, lighthouse: str) -> None:
    """Train as a replica of torchft, of one process, until killed."""
    import torchft

    diary = Diary(folder, name)
    diary.say("start")
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("torchft.manager").addHandler(_Errors(diary))
    model = WholeModel(read_profile(folder / "profile.json"), name)
    sums, wait = (datetime.timedelta(seconds=seconds) for seconds in (SUM_TIMEOUT_S, TIMEOUT_S))
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=sums), load_state_dict=model.take, state_dict=model.state,
        min_replica_size=1, use_async_quorum=False, timeout=wait, quorum_timeout=wait, connect_timeout=wait,
        rank=0, world_size=1, store_addr=LOOPBACK, store_port=store.port, lighthouse_addr=lighthouse, replica_id=name,
        hostname=LOOPBACK, heartbeat_interval=datetime.timedelta(milliseconds=HEARTBEAT_MS), init_sync=False,
    )  # fmt: skip
    ddp = torchft.DistributedDataParallel(
        manager, model.chain, broadcast_buffers=False, gradient_as_bucket_view=True, init_sync=False
    )
    diary.say("ready")
    while True:
        manager.start_quorum()
        _torchft_step(manager, ddp, model, diary)


def _torchft_step(manager: Any, ddp: torch.nn.Module, model: WholeModel, diary: Diary) -> None:
    """Train a step; what is not committed is trained again, on the same samples, under the next quorum."""
    step = manager.current_step()
    mark = model.mark()
    manager.allreduce(mark, reduce_op=dist.ReduceOp.SUM).wait()
    present = [name for name, there in zip(model.devices, mark.tolist(), strict=True) if there]
    if manager.errored() or len(present) != manager.num_participants():
        manager.report_error(RuntimeError("nobody knows who takes part"))
        manager.should_commit()
        diary.say("redone", step=step, samples=0)
        return
    rows, samples = model.rows(step, present)
    loss_sum = ddp(rows)
    # The manager divides sums by the number of those that take part.
    (loss_sum * manager.num_participants() / BATCH).backward()
    totals = torch.stack([loss_sum.detach().double(), torch.tensor(float(samples), dtype=torch.float64)])
    manager.allreduce(totals, reduce_op=dist.ReduceOp.SUM).wait()
    if not manager.should_commit():
        ddp.zero_grad(set_to_none=True)
        diary.say("redone", step=step, samples=samples)
        return
    model.end.run(step)
    loss, all_samples = totals.tolist()
    assert all_samples == BATCH, f"{all_samples} samples"
    diary.say("step", step=step, loss=loss / BATCH, devices=present, shares=samples)


def elastic_device(folder: Path, name: str, endpoint: str) -> None:
    """Be a node's agent of TorchElastic, which forks its worker: the model is made once, all workers have it."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.basicConfig(format="%(asctime)s %(name)s %(message)s")
    model = WholeModel(read_profile(folder / "profile.json"), name)
    nodes = len(model.devices)
    config = LaunchConfig(
        min_nodes=nodes - 1, max_nodes=nodes, nproc_per_node=1, run_id="rivals", rdzv_backend="c10d",
        rdzv_endpoint=endpoint, rdzv_configs={**RENDEZVOUS, "is_host": "0"}, max_restarts=100,
        monitor_interval=MONITOR_S, start_method="fork", local_addr=LOOPBACK, logs_specs=DefaultLogsSpecs(os.devnull),
    )  # fmt: skip
    elastic_launch(config, elastic_worker)(folder, name, model)


def elastic_worker(folder: Path, name: str, model: WholeModel) -> None:
    """Train with DistributedDataParallel and a checkpoint after every step, until killed or a sum fails."""
    die_with_parent()
    torch.set_num_threads(1)
    diary = Diary(folder, name)
    diary.say("start")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    mark = model.mark()
    dist.all_reduce(mark)
    present = [name for name, there in zip(model.devices, mark.tolist(), strict=True) if there]
    step, checkpoint = 0, folder / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint)
        step = state["step"]
        model.take(state)
    dist.barrier()  # else the first may write while the last reads
    ddp = DistributedDataParallel(model.chain, broadcast_buffers=False, gradient_as_bucket_view=True, init_sync=False)
    diary.say("ready")
    while True:
        try:
            loss = _elastic_step(ddp, model, step, present)
        except RuntimeError as error:
            diary.say("known", text=str(error)[-200:], step=step)
            os._exit(1)
        if dist.get_rank() == 0:
            torch.save({"step": step + 1, **model.state()}, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").rename(checkpoint)
            diary.say("step", step=step, loss=loss, devices=present)
        step += 1


def _elastic_step(ddp: DistributedDataParallel, model: WholeModel, step: int, present: Collection[str]) -> float:
    rows, _ = model.rows(step, present)
    loss_sum = ddp(rows)
    # Gradients are divided by the number of processes.
    (loss_sum * len(present) / BATCH).backward()
    total = loss_sum.detach().double()
    dist.all_reduce(total)
    model.end.run(step)
    return float(total) / BATCH


def lighthouse(folder: Path) -> None:
    """Be torchft's lighthouse until killed."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=f"{LOOPBACK}:0", min_replicas=1, join_timeout_ms=JOIN_TIMEOUT_MS, quorum_tick_ms=TICK_MS,
        heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
    )  # fmt: skip
    port = server.address().rpartition(":")[2]
    Diary(folder, "").say("meeting", address=f"http://{LOOPBACK}:{port}")
    signal.pause()


def store(folder: Path) -> None:
    """Be the store at which agents of TorchElastic meet until killed."""
    server = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    Diary(folder, "").say("meeting", address=f"{LOOPBACK}:{server.port}")
    signal.pause()


def main() -> None:
    """Be one of them."""
    die_with_parent()
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("lighthouse", "store", "torchft", "elastic"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("device", nargs="?", default="")
    parser.add_argument("address", nargs="?", default="")
    options = parser.parse_args()
    match options.role:
        case "lighthouse":
            lighthouse(options.folder)
        case "store":
            store(options.folder)
        case "torchft":
            torchft_device(options.folder, options.device, options.address)
        case _:
            elastic_device(options.folder, options.device, options.address)


if __name__ == "__main__":
    main()
