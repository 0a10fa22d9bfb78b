"""A JobSet for each site, which is a cluster of Kubernetes: a folder for `kubectl apply -k`, with nothing to fill in.

As of https://jobset.sigs.k8s.io (jobset.x-k8s.io/v1alpha2). A worker is a pod on the node that its host is named after,
in that node's own network, so that workers of other clusters reach it.
"""

import hashlib
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import yaml

from spantrain.app.launch.batch import TOKEN_FILE, BatchWorkers
from spantrain.app.launch.way import LaunchWay, WantedWorkers
from spantrain.app.reporter import Reporter
from spantrain.config.files.parsing import parse_json
from spantrain.config.files.text_files import write_atomically
from spantrain.core.cluster import Device
from spantrain.errors import ConfigError, WorkerError
from spantrain.reach.machines import run_tool

_CODE_FILE = "code.tar.gz"
_MOST_CODE_BYTES = 900_000
"""A ConfigMap holds 1 MiB."""
_UNPACK = 'mkdir -p /tmp/code && tar -xzf "$0" -C /tmp/code && cd /tmp/code && export PYTHONPATH=/tmp/code && exec "$@"'
_JOBSET = "jobset.sigs.k8s.io"
_SHARED_MEMORY = "8Gi"


class KubernetesWorkers(BatchWorkers):
    """`kubectl apply -k` for each site; the names of hosts are those of nodes, and `--option` names the context."""

    patience_s: ClassVar[float] = 7 * 86_400.0

    def __init__(self, wanted: WantedWorkers, way: LaunchWay, reporter: Reporter) -> None:
        super().__init__(wanted, way, reporter)
        # Names of jobs are labels of DNS and may be short; those of devices need be neither.
        self.job_names = {device: f"w{number}" for number, device in enumerate(wanted.devices)}
        self._applied: set[str] = set()
        self._told: set[str] = set()

    def prepare(self) -> None:
        """Write a folder for each site."""
        code = self.options.code
        if code is not None and len(code.packed) > _MOST_CODE_BYTES:
            raise ConfigError(
                f"--code {code.root}: packed it has {len(code.packed)} bytes, a ConfigMap holds {_MOST_CODE_BYTES}; "
                "put it into the image instead"
            )
        for site in self.wanted.by_site:
            folder = self.written(site)
            write_atomically(folder / "jobset.yaml", _yaml(self._job_set(site)))
            write_atomically(folder / "kustomization.yaml", _yaml(self._kustomization(site)))
            if code is not None:
                write_atomically(folder / _CODE_FILE, code.packed)

    def _job_set(self, site: str) -> dict[str, Any]:
        """Return the JobSet of a site: a job of one pod for each worker."""
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": set_name(self.wanted, site), "labels": {"app.kubernetes.io/name": "spantrain"}},
            "spec": {
                "failurePolicy": {"maxRestarts": 0},
                "replicatedJobs": [
                    {"name": self.job_names[device.name], "replicas": 1, "template": {"spec": self._job(device)}}
                    for devices in self.wanted.by_site[site].values()
                    for device in devices
                ],
            },
        }

    def _job(self, device: Device) -> dict[str, Any]:
        pod = {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "hostNetwork": True,
            "dnsPolicy": "ClusterFirstWithHostNet",
            "nodeSelector": {"kubernetes.io/hostname": device.host},
            "terminationGracePeriodSeconds": 30,
            "containers": [self._container(device)],
            "volumes": [volume for _, volume in self._volumes(device.site)],
        }
        return {"parallelism": 1, "completions": 1, "backoffLimit": 0, "template": {"spec": pod}}

    def _container(self, device: Device) -> dict[str, Any]:
        place = (device.host, device.site)
        gpu = device.backend.startswith("cuda")
        worker = self.options.worker_words(self.wanted, device, sees_one_gpu=True)
        unpack = ["sh", "-c", _UNPACK, f"/spantrain/{_CODE_FILE}"] if self.options.code else []
        # Or `$(NAME)` in a value would become another variable's.
        own = {name: value.replace("$", "$$") for name, value in self.options.environment_at(place).items()}
        return {
            "name": "worker",
            "image": self.options.image,
            "command": [*unpack, self.options.python_at(place), *worker],
            "env": [{"name": name, "value": value} for name, value in own.items()],
            "envFrom": [{"secretRef": {"name": f"{set_name(self.wanted, device.site)}-token"}}],
            "resources": {"limits": {"nvidia.com/gpu": 1}} if gpu else {},
            "securityContext": {"allowPrivilegeEscalation": False},
            "volumeMounts": [
                {"name": volume["name"], "mountPath": path, **({} if path == "/dev/shm" else {"readOnly": True})}
                for path, volume in self._volumes(device.site)
            ],
        }

    def _volumes(self, site: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield where each volume is mounted, and the volume."""
        yield "/dev/shm", {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _SHARED_MEMORY}}
        if self.options.code is not None:
            yield "/spantrain", {"name": "code", "configMap": {"name": f"{set_name(self.wanted, site)}-code"}}
        for number, path in enumerate(self.wanted.data):
            # A node refuses a pod where it has not got it: a file or a folder, as it is here.
            kind = "File" if Path(path).is_file() else "Directory" if Path(path).is_dir() else ""
            yield path, {"name": f"data-{number}", "hostPath": {"path": path, "type": kind}}

    def _kustomization(self, site: str) -> dict[str, Any]:
        name = set_name(self.wanted, site)
        generated: dict[str, Any] = {"secretGenerator": [{"name": f"{name}-token", "envs": [TOKEN_FILE]}]}
        if self.options.code is not None:
            generated["configMapGenerator"] = [{"name": f"{name}-code", "files": [_CODE_FILE]}]
        return {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": ["jobset.yaml"],
            "generatorOptions": {"disableNameSuffixHash": True},
            **generated,
        }

    def token_folders(self) -> Sequence[Path]:
        """Return the folder of each site: files outside of it are not read."""
        return [self.written(site) for site in self.wanted.by_site]

    def submit_words(self, site: str) -> list[str]:
        """Return what applies it."""
        return self._kubectl(site, "apply", "-k", str(self.written(site)))

    def submit(self, site: str) -> None:
        """Apply it."""
        self._applied.add(site)
        run_tool(self.submit_words(site))
        self.reporter.note(f"Applied JobSet {set_name(self.wanted, site)} for {site}")

    def look(self, site: str) -> None:
        """Tell of workers whose job has failed."""
        chosen = f"--selector={_JOBSET}/jobset-name={set_name(self.wanted, site)}"
        answer = parse_json(run_tool(self._kubectl(site, "get", "jobs", chosen, "--output=json")), "kubectl's jobs")
        failed = {
            job["metadata"]["labels"][f"{_JOBSET}/replicatedjob-name"]
            for job in answer["items"]
            if job.get("status", {}).get("failed")
        }
        for device, name in self.job_names.items():
            if name in failed and device not in self._told and self.wanted.cluster.device_by_name[device].site == site:
                self._told.add(device)
                self.note_end(device, "its pod has failed")
                self._fetch_log(site, device)  # there may be none

    def take_back(self, site: str) -> None:
        """Fetch the logs, and delete all that was applied."""
        if site not in self._applied:
            return
        for device in (one for devices in self.wanted.by_site[site].values() for one in devices):
            try:
                self._fetch_log(site, device.name)
            except WorkerError as error:
                self.reporter.note(f"{device.name}: no log: {error}")
        run_tool(self._kubectl(site, "delete", "--ignore-not-found", "--wait=false", "-k", str(self.written(site))))

    def _fetch_log(self, site: str, device: str) -> None:
        job = f"job/{set_name(self.wanted, site)}-{self.job_names[device]}-0"
        said = run_tool(self._kubectl(site, "logs", job))
        self.log_of(device).write_text(said, encoding="utf-8")

    def _kubectl(self, site: str, *words: str) -> list[str]:
        return ["kubectl", *self.options.words_at((site,)), *words]


def set_name(wanted: WantedWorkers, site: str) -> str:
    """Return what a site's JobSet is called: a label of DNS, such as `spantrain-lab-1-north-3f9c2a`.

    Other runs, and sites whose names begin alike, have other ones: what is there under a name is replaced and deleted.
    """
    own = hashlib.sha256(f"{socket.gethostname()}:{wanted.log_folder.resolve()}:{site}".encode()).hexdigest()
    return f"spantrain-{re.sub('[^a-z0-9]+', '-', site.lower())[:20].strip('-')}-{own[:6]}"


def _yaml(document: object) -> str:
    return yaml.safe_dump(document, sort_keys=False, width=120)
