"""Workers as actors of a placement group on a Ray cluster that is there: Ray starts them again, and has their logs.

What goes between Ray's processes, the token among it, is encrypted only where Ray was told so (RAY_USE_TLS).
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from spantrain.app.launch.way import LaunchedWorkers, LaunchWay, WantedWorkers
from spantrain.app.reporter import Reporter
from spantrain.core.cluster import Host
from spantrain.errors import ConfigError, PeerLostError
from spantrain.reach.code import PackedCode
from spantrain.reach.programs.keeper import code_folder, end_with_parent, place_code

_LOOK_S, _LEAVE_S = 1.0, 3.0
_PLACE_S = 600.0
_PINCH = 0.001
"""Of a resource that stands for a node."""


class RayWorkers(LaunchedWorkers):
    """Actors, each of which runs a worker, on the cluster that RAY_ADDRESS names, or else this machine's.

    Hosts are nodes with a resource of their name.
    """

    patience_s: ClassVar[float] = 86_400.0

    def __init__(self, wanted: WantedWorkers, way: LaunchWay, reporter: Reporter) -> None:
        super().__init__(wanted, way, reporter)
        self._words: dict[str, list[str]] = {}
        self._ray: Any = None
        self._group: Any = None
        self._actors: dict[str, Any] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def prepare(self) -> None:
        """Find the cluster."""
        self._words = self.words_of_all(sees_one_gpu=True)
        try:
            import ray
        except ImportError:
            raise ConfigError("--ray: Ray is not installed here; pip install ray, of the cluster's version") from None
        before = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address="auto", log_to_driver=False, configure_logging=False)
        except ConnectionError as error:
            raise ConfigError(f"--ray: {error}; start a cluster with `ray start`, or set RAY_ADDRESS") from None
        finally:
            signal.signal(signal.SIGTERM, before)  # Ray takes it
        self._ray = ray

    def start(self, join: str, token: str) -> None:
        """Have a placement group made, and an actor in each of its bundles."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        devices = [self.wanted.cluster.device_by_name[name] for name in self.wanted.devices]
        hosts = self.wanted.cluster.host_by_name
        known = self._ray.cluster_resources()
        bundles = [
            {
                "CPU": 1,
                **({"GPU": 1} if device.backend.startswith("cuda") else {}),
                **node_resource(hosts[device.host], known),
            }
            for device in devices
        ]
        self._group = placement_group(bundles, strategy="PACK", name=f"spantrain-{os.getpid()}")
        self.reporter.note(f"Waiting for Ray to place {len(bundles)} workers")
        if not self._group.wait(_PLACE_S):
            raise PeerLostError(f"Ray has no room for {bundles}; see `ray status`")
        options, actor = self.options, self._ray.remote(WorkerActor)
        for number, device in enumerate(devices):
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
            placed = actor.options(
                scheduling_strategy=strategy,
                num_cpus=1,
                num_gpus=int("GPU" in bundles[number]),
                max_restarts=self.way.restarts,
                max_task_retries=self.way.restarts,
            )
            place = (device.host, device.site)
            python, told = options.python_at(place, ""), options.told_at(place, join, token)
            self._actors[device.name] = placed.remote(
                python, self._words[device.name], told, self.wanted.data, options.code
            )
        self._thread.start()

    def where_is_log(self, device: str) -> str:
        """Return the command that shows it: Ray has it."""
        actor = self._actors.get(device)
        return f"`ray logs actor --id {actor._actor_id.hex()}`" if actor is not None else "Ray's"

    def close(self) -> None:
        """End all actors, and give back their places."""
        if self._thread.is_alive():
            self._thread.join(_LEAVE_S)  # of one that is killed at work Ray prints that it will be tried again
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10 * _LOOK_S)
        for actor in self._actors.values():
            self._ray.kill(actor, no_restart=True)
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self._group)
        if self._ray is not None:
            self._ray.shutdown()

    def _watch(self) -> None:
        waiting = {actor.run.remote(): device for device, actor in self._actors.items()}
        while waiting and not self._stop.is_set():
            done, _ = self._ray.wait(list(waiting), timeout=_LOOK_S)
            for reference in done:
                try:
                    how = f"its worker {self._ray.get(reference)}"
                except self._ray.exceptions.RayError as error:
                    how = f"its actor has died: {str(error).strip().splitlines()[0]}"
                self.note_end(waiting.pop(reference), how)


class WorkerActor:
    """Runs a worker on a node of Ray's; it ends with the actor."""

    def __init__(
        self, python: str, words: Sequence[str], told: Mapping[str, str], data: Sequence[str], code: PackedCode | None
    ) -> None:
        self._command = [python or sys.executable, *words]
        self._environment = {**os.environ, **told}
        self._missing = [path for path in data if not os.path.exists(path)]
        self._folder: str | None = None
        if code is not None:
            folder = code_folder(code.digest)
            self._folder = str(folder if folder.is_dir() else place_code(code.digest, code.packed))
            paths = (self._folder, self._environment.get("PYTHONPATH"))
            self._environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

    def run(self) -> str:
        """Run the worker, and return how it ended; where it failed and Ray may start it again, the actor dies of it."""
        if self._missing:
            return (
                f"was not started: data {', '.join(self._missing)} is not there; copy it: code is copied, data are not"
            )
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        status = subprocess.call(
            self._command, env=self._environment, cwd=self._folder, stdin=subprocess.DEVNULL, preexec_fn=end_with_parent
        )
        if status == 0:
            return "ended with status 0"
        os._exit(1)


def node_resource(host: Host, known: Mapping[str, float]) -> dict[str, float]:
    """Return what only the node has that a host is.

    Raises:
        ConfigError: none of Ray's nodes is that.
    """
    for resource in (host.name, f"node:{host.address}"):
        if resource in known:
            return {resource: _PINCH}
    raise ConfigError(
        f"host {host.name}: no node of Ray is that; start it there with `ray start ... --resources "
        f"'{{\"{host.name}\": 1}}'`, or give the host the address that Ray has of it"
    )
