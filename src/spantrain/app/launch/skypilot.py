"""A SkyPilot task for each site, for `sky launch`: the join token is a secret of it.

As of https://docs.skypilot.co/en/latest/reference/yaml-spec.html; a task's node of rank N is the site's Nth host.
"""

import shlex
from collections.abc import Iterator
from typing import Any

import yaml

from spantrain.app.launch.batch import TOKEN_FILE, BatchWorkers
from spantrain.app.launch.way import joining
from spantrain.config.files.text_files import write_atomically
from spantrain.errors import ConfigError


class SkypilotTasks(BatchWorkers):
    """Tasks are written; whoever has a cloud's credentials starts them."""

    suffix = ".sky.yaml"

    def prepare(self) -> None:
        """Write a task for each site."""
        if self.options.code is not None and not self.options.code.root.is_dir():
            raise ConfigError(f"--code {self.options.code.root}: SkyPilot copies folders; unpack the wheel into one")
        for site in self.wanted.by_site:
            write_atomically(self.written(site), yaml.safe_dump(self.task(site), sort_keys=False, width=120))

    def task(self, site: str) -> dict[str, Any]:
        """Return a site's task.

        Raises:
            ConfigError: its hosts have unlike GPUs, which nodes of one task have not.
        """
        hosts = self.wanted.by_site[site]
        kinds = {tuple(sorted(device.kind for device in devices)) for devices in hosts.values()}
        if len(kinds) > 1:
            raise ConfigError(
                f"site {site}: its hosts are unlike, and nodes of a SkyPilot task are alike; make them two sites"
            )
        devices = next(iter(hosts.values()))
        gpus = [device for device in devices if device.backend.startswith("cuda")]
        code = self.options.code
        return {
            "name": f"spantrain-{site}",
            "num_nodes": len(hosts),
            "resources": {
                **({"accelerators": {_accelerator(gpus[0].kind): len(gpus)}} if gpus else {}),
                **({"image_id": f"docker:{self.options.image}"} if self.options.image else {}),
            },
            **({"workdir": str(code.root)} if code else {}),
            "secrets": dict.fromkeys(joining("", "", next(iter(self.options.relays.values()), None))),
            "run": "\n".join(self._run(site)) + "\n",
        }

    def _run(self, site: str) -> Iterator[str]:
        yield 'export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"'
        yield 'case "$SKYPILOT_NODE_RANK" in'
        for rank, (host, devices) in enumerate(self.wanted.by_site[site].items()):
            yield f"{rank})"
            own = [f"{name}={value}" for name, value in self.options.environment_at((host, site)).items()]
            begin = [*(["env", *own] if own else []), self.options.python_at((host, site))]
            for device in devices:
                yield f"  {shlex.join([*begin, *self.options.worker_words(self.wanted, device)])} &"
            yield "  ;;"
        yield "esac"
        yield "wait"

    def submit_words(self, site: str) -> list[str]:
        """Return what starts it."""
        words = ["sky", "launch", "--cluster", f"spantrain-{site}", "--detach-run"]
        secret = ["--secret-file", str(self.folder / TOKEN_FILE)]
        return [*words, *secret, *self.options.words_at((site,)), str(self.written(site))]


def _accelerator(kind: str) -> str:
    """Return what SkyPilot calls a kind of GPU.

    >>> _accelerator("rtx-4090"), _accelerator("h100")
    ('RTX4090', 'H100')
    """
    return kind.upper().replace("RTX-", "RTX")
