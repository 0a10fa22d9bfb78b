"""A Slurm job for each site: hosts are its nodes, logs and code lie on a file system that nodes share."""

import os
import shlex
from collections.abc import Iterator
from typing import ClassVar

from spantrain.app.launch.batch import TOKEN_FILE, BatchWorkers
from spantrain.app.launch.way import LaunchWay, WantedWorkers
from spantrain.app.reporter import Reporter
from spantrain.config.files.text_files import write_atomically
from spantrain.errors import WorkerError
from spantrain.reach.machines import run_tool
from spantrain.reach.programs.keeper import code_folder, place_code

_WORKER = """\
worker() {  # PART GPUS NODE LOG WORD...
  srun "$1" "$2" --overlap --nodes=1 --ntasks=1 --nodelist="$3" --cpu-bind=none --kill-on-bad-exit=0 \\
    --output="$4" --open-mode=append "${@:5}" &
}
"""


class SlurmWorkers(BatchWorkers):
    """`sbatch` for each site; the names of hosts are those of nodes."""

    patience_s: ClassVar[float] = 7 * 86_400.0
    """Jobs wait until there is room for them."""
    suffix = ".sbatch"

    def __init__(self, wanted: WantedWorkers, way: LaunchWay, reporter: Reporter) -> None:
        super().__init__(wanted, way, reporter)
        self._jobs: dict[str, str] = {}
        self._states: dict[str, str] = {}

    def prepare(self) -> None:
        """Put code into the cache of this machine's user, and write a script for each site."""
        code = self.options.code
        if code is not None and not code_folder(code.digest).is_dir():
            place_code(code.digest, code.packed)
        for site in self.wanted.by_site:
            write_atomically(self.written(site), "\n".join(self._script(site)) + "\n")

    def _script(self, site: str) -> Iterator[str]:
        yield "#!/bin/bash"
        log = str(self.wanted.log_folder.resolve() / f"slurm-{site}.log").replace("%", "%%")  # else a pattern's begin
        yield f"#SBATCH --job-name=spantrain-{site}"
        yield f"#SBATCH --output={shlex.quote(log)}"
        yield "#SBATCH --no-requeue"
        groups: dict[int, list[str]] = {}
        for host, devices in self.wanted.by_site[site].items():  # those with as many GPUs are one part of the job
            numbers = [int(one.backend.partition(":")[2] or 0) for one in devices if one.backend.startswith("cuda")]
            groups.setdefault(max(numbers, default=-1) + 1, []).append(host)
        for number, (gpus, names) in enumerate(groups.items()):
            if number:
                yield "#SBATCH hetjob"
            words = [f"--nodes={len(names)}", f"--nodelist={','.join(names)}", "--exclusive", "--mem=0"]
            words += [f"--gpus-per-node={gpus}"] if gpus else []
            together = shlex.join(self.options.words_at((site,)))
            for word in filter(None, (*words, together)):
                yield f"#SBATCH {word}"
        # What it does: a step for each worker, all at once.
        yield f"set -a; . {shlex.quote(str(self.folder / TOKEN_FILE))}; set +a"
        if self.options.code is not None:
            folder = code_folder(self.options.code.digest)
            yield f"cd {shlex.quote(str(folder))}"
        lacks = '{ echo "data $path is not on $(hostname); copy it there: code is copied, data are not"; exit 2; }'
        looks = (
            f'for path in {shlex.join(self.wanted.data)}; do [ -e "$path" ] || {lacks}; done; '
            if self.wanted.data
            else ""
        )
        finds = 'export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"; ' if self.options.code else ""
        check = f'{looks}{finds}exec "$@"'  # what a shell does on a node before it becomes a worker
        yield f"check={shlex.quote(check)}"
        yield _WORKER
        for number, (gpus, names) in enumerate(groups.items()):
            for host in names:
                for device in self.wanted.by_host[host]:
                    place = (host, site)
                    part = f"--het-group={number}" if len(groups) > 1 else "--quiet"
                    own = (f"{name}={value}" for name, value in self.options.environment_at(place).items())
                    log = str(self.log_of(device.name).resolve()).replace("%", "%%")
                    words = [
                        os.path.expanduser(self.options.python_at(place)),
                        *self.options.worker_words(self.wanted, device),
                    ]
                    places = [part, f"--gpus-per-node={gpus}" if gpus else "--quiet", host, log]
                    begin = shlex.join(["worker", *places, "env", *own, "bash", "-c"])
                    yield f'{begin} "$check" worker {shlex.join(words)}'
        yield "wait"

    def submit_words(self, site: str) -> list[str]:
        """Return what submits it."""
        return ["sbatch", "--parsable", str(self.written(site))]

    def submit(self, site: str) -> None:
        """Submit it."""
        answer = run_tool(self.submit_words(site)).strip()
        self._jobs[site] = answer.partition(";")[0]
        self.reporter.note(f"Submitted job {answer} for {site}")

    def look(self, site: str) -> None:
        """Tell of a job's state where it changes, and of its end."""
        before = self._states.get(site, "")
        state = self._state(site)
        if state == before or before == "ended":
            return
        self._states[site] = state
        if state == "ended":
            log = self.wanted.log_folder / f"slurm-{site}.log"
            for device in (one for devices in self.wanted.by_site[site].values() for one in devices):
                self.note_end(device.name, f"job {self._jobs[site]} has ended, its output: {log}")
        else:
            self.reporter.note(f"Job {self._jobs[site]} of {site}: {state}")

    def is_under_way(self, site: str) -> bool:
        """Whether it has not ended."""
        return site in self._jobs and self._state(site) != "ended"

    def take_back(self, site: str) -> None:
        """Cancel the job, unless it has ended."""
        if self.is_under_way(site):
            run_tool(["scancel", "--full", self._jobs[site]])

    def _state(self, site: str) -> str:
        words = ["squeue", "--noheader", "--format=%T %r", f"--jobs={self._jobs[site]}"]
        try:
            found = run_tool(words).strip().splitlines()
        except WorkerError as error:  # a controller that is busy says nothing: it is as it was
            return "ended" if "Invalid job id" in str(error) else self._states.get(site, "")
        return found[0].removesuffix(" None") if found else "ended"
