"""Starts workers on this machine by forking a process that has loaded torch already.

Loading torch and transformers takes seconds for every process; here it is done once. The fork server reads one JSON
object a line on standard input (a worker to start) and writes one a line on standard output (a worker that has
ended). At an empty line, or when its input ends, however its parent died, it ends all its workers and removes the
folder that its argument names. Neither gRPC nor ZeroMQ is used before the fork: both break when they are.
"""

import ctypes
import faulthandler
import gc
import json
import logging
import os
import select
import shutil
import signal
import sys
import traceback
from typing import Any

from spantrain.errors import SpanTrainError
from spantrain.testbed.namespace_handle import NamespaceHandle

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until the input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whoever ends all of a job's processes: the parent says what ends
    load()
    _say({"ready": True})
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, str] = {}
    buffer = b""
    while True:
        readable, _, _ = select.select([0, wake_read], [], [], 1.0)
        if 0 in readable:
            data = os.read(0, 65536)
            *lines, buffer = (buffer + data).split(b"\n")
            if not data or b"" in lines:
                break
            for request in map(json.loads, lines):
                if "signal" in request:
                    for pid in [one for one, name in children.items() if name == request["name"]]:
                        os.kill(pid, request["signal"])
                    continue
                children[_start(request)] = request["name"]
        if wake_read in readable:
            os.read(wake_read, 4096)
        _reap(children)
    for pid in children:  # they hold nothing that outlives them
        os.kill(pid, signal.SIGKILL)
    for pid in children:
        os.waitpid(pid, 0)
    for folder in sys.argv[1:]:
        shutil.rmtree(folder, ignore_errors=True)


def load() -> None:
    """Load what every worker needs and what is safe to have before a fork; nobody waits for it then in a run.

    It stays, so it is not looked through for garbage: that takes a third of the time, and copies all behind a fork.
    """
    gc.disable()
    import torch
    import torch.distributed
    import transformers.models.bert.modeling_bert
    import transformers.models.efficientnet.modeling_efficientnet
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.resnet.modeling_resnet  # noqa: F401

    import spantrain.models.execution.stage
    import spantrain.models.graph
    import spantrain.profiler.compute
    import spantrain.runtime.control.orders
    import spantrain.runtime.gradients.optimizer
    import spantrain.runtime.step.work
    import spantrain.runtime.worker.worker
    import spantrain.schedule.dispatch.policies  # noqa: F401
    from spantrain.config.files.text_files import own_code

    own_code()  # which is kept
    torch.set_num_threads(1)
    gc.freeze()
    gc.enable()


def _say(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def _start(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _become_worker(request)
        status = 0
    except SpanTrainError as error:
        sys.stderr.write(f"Error: {error}\n")
    except BaseException:  # noqa: BLE001  one of the two outermost loops: the log gets all
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _become_worker(request: dict[str, Any]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    if request["namespace"]:
        NamespaceHandle(**request["namespace"]).enter()
    os.environ.update(request["environment"])
    from spantrain.runtime.worker.settings import WorkerSettings
    from spantrain.runtime.worker.worker import Worker

    settings = {**request["settings"], "functions": tuple(request["settings"]["functions"])}
    worker = Worker(WorkerSettings(**settings))
    signal.signal(signal.SIGTERM, lambda *_: worker.leave("SIGTERM"))
    worker.run()


def _reap(children: dict[int, str]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        _say({"ended": children.pop(pid), "status": os.waitstatus_to_exitcode(status)})


if __name__ == "__main__":
    main()
