"""What `spantrain launch` writes for Slurm, Kubernetes and SkyPilot, and what it asks their programs to do."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from spantrain.app.launch.kubernetes import KubernetesWorkers, set_name
from spantrain.app.launch.skypilot import SkypilotTasks
from spantrain.app.launch.slurm import SlurmWorkers
from spantrain.app.launch.ssh import SshWorkers
from spantrain.app.launch.way import LaunchOptions, LaunchWay, WantedWorkers
from spantrain.app.reporter import SilentReporter
from spantrain.config.cluster_file import parse_cluster
from spantrain.errors import ConfigError
from spantrain.reach.code import PackedCode
from spantrain.transport.control.address import Address
from spantrain.transport.relay.protocol import RelayAccess
from testing.launches import CLUSTER, Told, on_this_machine, wanted_workers
from testing.machines import tool
from testing.patience import PATIENCE_S, until

JOIN, TOKEN = "10.0.0.5:7000", "st1secret"
RELAY = RelayAccess(address=Address.parse("10.0.0.9:9000"), token="r" * 32)


@pytest.fixture
def wanted(tmp_path) -> WantedWorkers:
    return wanted_workers(tmp_path)


@pytest.fixture
def options(tmp_path, monkeypatch) -> LaunchOptions:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code = tmp_path / "net.py"
    code.write_text("def make(): ...\n")
    return LaunchOptions(
        code=replace(PackedCode.of(_folder(tmp_path / "code", code)), root=tmp_path),
        python={"": "/opt/python", "box": "/home/me/python"},
        environment={"": {"A": "1"}, "box": {"A": "2"}},
        words={"lab": ("--partition=gpu", "-C", "a100&ib")},
        image="registry/spantrain:1",
    )


def _folder(folder: Path, *files: Path) -> Path:
    folder.mkdir()
    for file in files:
        shutil.copy(file, folder)
    return folder


@pytest.fixture
def written(wanted) -> Callable[[LaunchWay], Told]:
    """Write files for a way, as `--dry-run` does."""

    def write(way: LaunchWay) -> Told:
        told = Told()
        with way.prepare(wanted, told) as workers:
            workers.start(JOIN, TOKEN)
        return told

    return write


def check_token(folder: Path) -> None:
    """The token is in a file for its owner alone, and in no other."""
    file = folder / "token.env"
    assert file.read_text() == f"SPANTRAIN_JOIN={JOIN}\nSPANTRAIN_TOKEN={TOKEN}\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path for path in folder.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()] == [file]


def test_a_worker_has_its_words_and_finds_functions_in_the_code(wanted, options):
    box = wanted.cluster.device_by_name["box"]
    assert options.worker_words(wanted, box) == [
        "-m", "spantrain", "worker", "--name", "box", "--backend", "cpu", "--keep", "0", "--data-address", "10.0.0.7",
        "--insecure", "--function", "net.py:make", "--function", "package.module:data",
    ]  # fmt: skip
    assert options.environment_at(("box", "Field.2")) == {"A": "2"}
    with pytest.raises(
        ConfigError, match=r"net.py:make: workers call it, and it is not in what is copied; give --code"
    ):
        replace(options, code=None).worker_words(wanted, box)


def test_who_can_only_dial_out_is_given_the_relay_and_its_token_as_the_other_one(wanted, options, written):
    behind = replace(options, relays={"Field.2": RELAY})
    words = {name: behind.worker_words(wanted, device) for name, device in wanted.cluster.device_by_name.items()}
    assert {name for name, found in words.items() if "--relay" in found} == {"box"}
    assert words["box"][words["box"].index("--relay") + 1] == "10.0.0.9:9000"
    written(LaunchWay(workers=SlurmWorkers, options=behind, only_writes=True))
    folder = wanted.log_folder.parent / "launch"
    assert (
        (folder / "token.env").read_text().endswith(f"SPANTRAIN_TOKEN={TOKEN}\nSPANTRAIN_RELAY_TOKEN={RELAY.token}\n")
    )
    assert "--relay 10.0.0.9:9000" in (folder / "Field.2.sbatch").read_text()
    assert all(RELAY.token not in path.read_text() for path in folder.glob("*.sbatch"))
    task = SkypilotTasks(wanted, LaunchWay(workers=SkypilotTasks, options=behind), SilentReporter()).task("Field.2")
    assert task["secrets"].keys() == {"SPANTRAIN_JOIN", "SPANTRAIN_TOKEN", "SPANTRAIN_RELAY_TOKEN"}
    with pytest.raises(ConfigError, match=r"--relay Field=\.\.\.: .*did you mean Field.2"):
        replace(options, relays={"Field": RELAY}).check_names(wanted.cluster)


def test_hosts_are_called_as_the_cluster_file_says(wanted, options):
    workers = SshWorkers(wanted, LaunchWay(workers=SshWorkers, options=options), SilentReporter())
    assert workers.machine("box").target == "me@gate"
    assert workers.machine("small").target == "small"
    assert workers.machine("box").python == "/home/me/python"
    assert workers.within()[-1] == "registry/spantrain:1"
    with pytest.raises(ConfigError, match=r"--python lib=\.\.\.: the host or site must be one of .* did you mean lab"):
        replace(options, python={"lib": "python"}).check_names(wanted.cluster)


def test_a_site_is_a_slurm_job_of_all_its_nodes(wanted, options, written, tmp_path):
    told = written(LaunchWay(workers=SlurmWorkers, options=replace(options, image=None), only_writes=True))
    folder = tmp_path / "run" / "launch"
    script = (folder / "lab.sbatch").read_text()
    directives = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    parts = ["--exclusive", "--mem=0"]
    assert directives == [
        "--job-name=spantrain-lab", f"--output={tmp_path}/run/logs/slurm-lab.log", "--no-requeue",
        "--nodes=1", "--nodelist=big", *parts, "--gpus-per-node=2", "--partition=gpu -C 'a100&ib'", "hetjob",
        "--nodes=1", "--nodelist=small", *parts, "--gpus-per-node=1", "--partition=gpu -C 'a100&ib'",
    ]  # fmt: skip
    steps = [line for line in script.splitlines() if line.startswith("worker ")]
    assert [line.split()[1:4] for line in steps] == [
        *[["--het-group=0", "--gpus-per-node=2", "big"]] * 2,
        ["--het-group=1", "--gpus-per-node=1", "small"],
    ]
    assert "--backend cuda:1" in steps[1]
    assert "--partition" not in (folder / "Field.2.sbatch").read_text()
    check_token(folder)
    assert told.notes[0] == f"Wrote {folder}/lab.sbatch; start it with: sbatch --parsable {folder}/lab.sbatch"
    subprocess.run(["bash", "-n", folder / "lab.sbatch"], check=True, timeout=PATIENCE_S)


def test_a_site_is_a_folder_for_kubectl(wanted, options, written, tmp_path):
    written(LaunchWay(workers=KubernetesWorkers, options=options, only_writes=True))
    for site, name in (("lab", "spantrain-lab-"), ("Field.2", "spantrain-field-2-")):
        folder = tmp_path / "run" / "launch" / site
        job_set = yaml.safe_load((folder / "jobset.yaml").read_text())
        assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
        assert job_set["metadata"]["name"].startswith(name)
        check_token(folder)
    lab = yaml.safe_load((tmp_path / "run" / "launch" / "lab" / "jobset.yaml").read_text())
    assert lab["metadata"]["name"] + "-token" == secret_of(lab), "the one of this run"
    jobs = lab["spec"]["replicatedJobs"]
    assert [job["name"] for job in jobs] == ["w0", "w1", "w2"]
    pod = jobs[1]["template"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"kubernetes.io/hostname": "big"}
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 1}}
    assert container["command"][4:7] == ["/opt/python", "-m", "spantrain"]
    assert container["command"][container["command"].index("--backend") + 1] == "cuda:0", "the one that it sees"
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted == {"shm": "/dev/shm", "code": "/spantrain", "data-0": "/data/text with space"}
    assert mounted.keys() == {volume["name"] for volume in pod["volumes"]}


def test_a_variable_is_to_the_letter_what_was_said(wanted, options, written, tmp_path):
    """A kubelet makes another variable's value of `$(NAME)`, and `$` of `$$`."""
    options = replace(options, environment={"": {"A": "$(B) costs 5$$"}})
    written(LaunchWay(workers=KubernetesWorkers, options=options, only_writes=True))
    job_set = yaml.safe_load((tmp_path / "run" / "launch" / "lab" / "jobset.yaml").read_text())
    pod = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["env"] == [{"name": "A", "value": "$$(B) costs 5$$$$"}]


def secret_of(job_set):
    """Return the name of the secret of which a JobSet's workers have the token."""
    pod = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return pod["containers"][0]["envFrom"][0]["secretRef"]["name"]


def test_runs_and_sites_that_are_called_alike_take_nothing_from_each_other(wanted, tmp_path):
    """What has the same name is replaced, and deleted at the end."""
    other = replace(wanted, log_folder=tmp_path / "other" / "logs")
    sites = ("europe-west1-datacenter-a", "europe-west1-datacenter-b", "Europe.West1-data-cen-c")
    names = [set_name(run, site) for run in (wanted, other) for site in sites]
    assert len(set(names)) == 6
    assert all(re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])", name) and len(name) <= 40 for name in names)
    assert "--" not in set_name(wanted, "a" * 19 + "-b"), "a name may end where a word does"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kubectl_builds_what_was_written(wanted, options, written, tmp_path):
    written(LaunchWay(workers=KubernetesWorkers, options=options, only_writes=True))
    built = subprocess.run(
        ["kubectl", "kustomize", tmp_path / "run" / "launch" / "Field.2"],
        capture_output=True, check=True, timeout=PATIENCE_S,
    ).stdout  # fmt: skip
    parts = {part["kind"]: part for part in yaml.safe_load_all(built)}
    assert parts.keys() == {"JobSet", "Secret", "ConfigMap"}
    assert parts["Secret"]["metadata"]["name"] == f"{set_name(wanted, 'Field.2')}-token"
    assert parts["Secret"]["data"].keys() == {"SPANTRAIN_JOIN", "SPANTRAIN_TOKEN"}
    assert parts["ConfigMap"]["binaryData"].keys() == {"code.tar.gz"}


def test_a_job_set_is_one_by_its_published_schema(wanted, options, written, tmp_path):
    """The models that Kubeflow generates from JobSet's own definitions: all fields are known, and of their types."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")
    written(LaunchWay(workers=KubernetesWorkers, options=options, only_writes=True))
    for site in ("lab", "Field.2"):
        document = yaml.safe_load((tmp_path / "run" / "launch" / site / "jobset.yaml").read_text())
        read = models.JobsetV1alpha2JobSet.from_dict(document)
        assert json.loads(read.to_json()) == document, "nothing was left out as unknown"


def test_a_site_of_like_hosts_is_a_task_of_skypilot(wanted, options, written, tmp_path):
    with pytest.raises(ConfigError, match="site lab: its hosts are unlike"):
        written(LaunchWay(workers=SkypilotTasks, options=options, only_writes=True))
    alike = parse_cluster(CLUSTER.replace("t4: 1", "a100: 2"), source="this test")
    wanted = replace(wanted, cluster=alike, devices=tuple(device.name for device in alike.devices))
    with LaunchWay(workers=SkypilotTasks, options=options, only_writes=True).prepare(wanted, SilentReporter()) as tasks:
        tasks.start(JOIN, TOKEN)
    task = yaml.safe_load((tmp_path / "run" / "launch" / "lab.sky.yaml").read_text())
    assert task["num_nodes"] == 2
    assert task["resources"] == {"accelerators": {"A100": 2}, "image_id": "docker:registry/spantrain:1"}
    assert task["secrets"] == {"SPANTRAIN_JOIN": None, "SPANTRAIN_TOKEN": None}
    assert task["run"].count("-m spantrain worker") == 4
    check_token(tmp_path / "run" / "launch")
    subprocess.run(["bash", "-n"], input=task["run"].encode(), check=True, timeout=PATIENCE_S)


TOOLS = {
    "sbatch": 'bash "$2" >/dev/null 2>&1 & echo 42',
    "srun": """while [ "${1#--}" != "$1" ]; do case "$1" in --output=*) log="${1#--output=}";; esac; shift; done
"$@" >"$log" 2>&1""",
    "squeue": '[ -e "$STATE/over" ] && exit 0; echo RUNNING',
    "scancel": 'touch "$STATE/cancelled"',
}
"""Of Slurm, on one machine."""


@pytest.fixture
def tools(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "tools"
    folder.mkdir()
    for name, does in TOOLS.items():
        (folder / name).write_text(f"#!/bin/bash\n{does}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("STATE", str(folder))
    return folder


def test_jobs_of_slurm_are_submitted_looked_after_and_cancelled(wanted, options, tools, tmp_path):
    """Their workers have the token, the code and the data that are there; a job that ends takes its workers with it."""
    worker = tools / "python"
    worker.write_text('#!/bin/bash\necho "$SPANTRAIN_TOKEN $SPANTRAIN_JOIN $A $(ls) $*"\n')
    worker.chmod(0o755)
    data = tmp_path / "data"
    data.touch()
    way = LaunchWay(workers=SlurmWorkers, options=replace(options, image=None, python={"": str(worker)}))
    told = Told()
    with way.prepare(replace(wanted, data=(str(data),)), told) as workers:
        workers.start(JOIN, TOKEN)
        log = workers.log_of("box")
        until(lambda: log.exists() and log.read_text())
        assert log.read_text().startswith(f"{TOKEN} {JOIN} 2 net.py -m spantrain worker --name box")
        until(lambda: "Job 42 of lab: RUNNING" in told.notes)
        (tools / "over").touch()
        ends: dict[str, str] = {}
        until(lambda: ends.update(workers.ended()) or len(ends) == 4)
        assert ends["box"].startswith("job 42 has ended, its output: ")
    assert not (tools / "cancelled").exists()
    assert not (tmp_path / "run" / "launch" / "token.env").exists()


def test_a_job_is_cancelled_though_slurm_does_not_say_how_it_stands(wanted, options, tools, tmp_path):
    (tools / "squeue").write_text("#!/bin/bash\necho 'slurm_load_jobs error: Socket timed out' >&2; exit 1\n")
    with LaunchWay(workers=SlurmWorkers, options=replace(options, image=None)).prepare(wanted, Told()) as workers:
        workers.start(JOIN, TOKEN)
    assert (tools / "cancelled").exists()
    assert not (tmp_path / "run" / "launch" / "token.env").exists()


def test_data_that_a_node_lacks_is_named_in_its_log(wanted, options, tools, tmp_path):
    way = LaunchWay(workers=SlurmWorkers, options=replace(options, image=None))
    with way.prepare(wanted, Told()) as workers:
        workers.start(JOIN, TOKEN)
        log = workers.log_of("box")
        until(lambda: log.exists() and log.read_text())
        assert log.read_text().startswith("data /data/text with space is not on ")
    assert (tools / "cancelled").exists()


def test_job_sets_are_applied_looked_after_and_deleted_with_their_logs_fetched(wanted, options, tmp_path, monkeypatch):
    folder = tmp_path / "tools"
    job = {"metadata": {"labels": {"jobset.sigs.k8s.io/replicatedjob-name": "w3"}}, "status": {"failed": 1}}
    none = json.dumps({"items": []})
    failed = json.dumps({"items": [job]})
    tool(
        folder, "kubectl",
        f"""echo "$*" >> {folder}/said
case "$*" in *"get jobs"*field-2*) echo '{failed}';; *"get jobs"*) echo '{none}';; *" logs "*) echo "log of $*";;
esac""",
    )  # fmt: skip
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    way = LaunchWay(workers=KubernetesWorkers, options=replace(options, words={"lab": ("--context", "lab")}))
    with way.prepare(wanted, Told()) as workers:
        workers.start(JOIN, TOKEN)
        ends: dict[str, str] = {}
        until(lambda: ends.update(workers.ended()) or ends)
        assert ends == {"box": "its pod has failed"}
    said = (folder / "said").read_text().splitlines()
    launch = tmp_path / "run" / "launch"
    assert said[:2] == [f"--context lab apply -k {launch}/lab", f"apply -k {launch}/Field.2"]
    assert [line for line in said if "delete" in line] == [
        f"--context lab delete --ignore-not-found --wait=false -k {launch}/lab",
        f"delete --ignore-not-found --wait=false -k {launch}/Field.2",
    ]
    name = set_name(wanted, "lab")
    assert workers.log_of("big-gpu1").read_text() == f"log of --context lab logs job/{name}-w1-0\n"
    assert not (launch / "lab" / "token.env").exists()


def test_a_pod_that_fails_is_told_whatever_kubectl_says_besides(wanted, options, tmp_path, monkeypatch):
    """Its log may be gone with it, and an answer may be none."""
    folder = tmp_path / "tools"
    job = {"metadata": {"labels": {"jobset.sigs.k8s.io/replicatedjob-name": "w3"}}, "status": {"failed": 1}}
    tool(
        folder, "kubectl",
        f"""case "$*" in *"get jobs"*)
[ -e {folder}/asked ] && echo '{json.dumps({"items": [job]})}' || echo 'no answer'; touch {folder}/asked;;
*" logs "*) exit 1;; esac""",
    )  # fmt: skip
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    with LaunchWay(workers=KubernetesWorkers, options=replace(options, words={})).prepare(wanted, Told()) as workers:
        workers.start(JOIN, TOKEN)
        ends: dict[str, str] = {}
        until(lambda: ends.update(workers.ended()) or ends)
        assert ends == {"box": "its pod has failed"}


def test_a_container_on_each_host_keeps_its_workers(wanted, options, tmp_path, monkeypatch):
    """Docker is told of the network, the GPUs, data and the image; what runs inside is what runs without."""
    folder, data = tmp_path / "tools", tmp_path / "data"
    data.touch()
    script = f"""echo "$*" >> {folder}/said
while [ "$1" != registry/spantrain:1 ]; do shift; done; shift; exec "$@" """
    tool(folder, "docker", script)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for module in ("spantrain", "torch"):
        (tmp_path / "inside" / module).mkdir(parents=True)
        (tmp_path / "inside" / module / "__init__.py").touch()
    says = "import os, sys; sys.exit(os.environ['SPANTRAIN_TOKEN'])"
    (tmp_path / "inside" / "spantrain" / "__main__.py").write_text(says)
    python = tool(tmp_path, "python-inside", f'PYTHONPATH={tmp_path}/inside exec {sys.executable} "$@"')
    way = LaunchWay(workers=SshWorkers, options=LaunchOptions(image="registry/spantrain:1", python={"": str(python)}))
    wanted = replace(on_this_machine(wanted), data=(str(data),), devices=("big-gpu0",))
    with way.prepare(wanted, Told()) as workers:
        workers.start(JOIN, TOKEN)
        ends: dict[str, str] = {}
        until(lambda: ends.update(workers.ended()) or ends)
    assert ends == {"big-gpu0": f"its worker ended with status 1 ({TOKEN})"}
    mounts = f"--mount type=bind,readonly,source={data},target={data} --mount type=volume,source=spantrain-code,"
    run = f"run --rm --interactive --init --network=host --ipc=host --entrypoint= --gpus=all {mounts}"
    assert all(line.startswith(run) for line in (folder / "said").read_text().splitlines())
