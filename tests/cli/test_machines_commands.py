"""`spantrain init` and `spantrain doctor`, as a user has them."""

import json
import re

import pytest
from typer.testing import CliRunner

from spantrain.app.machines.describe import found_cluster
from spantrain.app.reporter import SilentReporter
from spantrain.cli.main import app, main
from spantrain.config.cluster_file import load_cluster
from spantrain.reach.machines import Machine
from testing.machines import interpreter, tool

RUN = CliRunner()


def refused(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    said = capsys.readouterr()
    return ended.value.code, said.err


def test_init_writes_what_doctor_checks(tmp_path, monkeypatch):
    tool(
        tmp_path,
        "nvidia-smi",
        'case "$*" in *memory.total*) echo "0, NVIDIA L4, 23034, 22500, 550.54.15, 72.00";; esac',
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    done = RUN.invoke(app, ["init", "--name", "mine", "--site", "lab=spare"])
    assert done.exit_code != 0
    done = RUN.invoke(app, ["init", "--name", "mine", "--json"])
    assert done.exit_code == 0, done.output
    cluster = load_cluster(tmp_path / "cluster.yaml")
    assert [(one.kind, one.backend) for one in cluster.devices] == [("l4", "cuda:0")]
    assert json.loads(done.stdout)["cluster"]["name"] == "mine"
    checked = RUN.invoke(app, ["doctor", "--quick", "--json", "--data", str(tmp_path), "--cluster", "cluster.yaml"])
    report = json.loads(checked.stdout)
    assert {line["verdict"] for line in report["lines"] if line["check"] == "reach"} == {"ok"}
    assert checked.exit_code == (1 if report["fail"] else 0)
    assert {"check", "where", "verdict", "text", "remedy"} == set(report["lines"][0])
    assert any(line["check"] == "gpu" and "NVIDIA L4" in line["text"] for line in report["lines"])
    assert any(line["check"] == "data" and line["verdict"] == "ok" for line in report["lines"])


def test_a_gpu_of_an_unknown_kind_is_measured_by_the_torch_that_is_there(tmp_path, monkeypatch):
    tool(tmp_path, "nvidia-smi", 'case "$*" in *memory.total*) echo "0, NVIDIA Odd 7, 8192, 8000, 600.1, 99.00";; esac')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    python = interpreter(tmp_path)
    (tmp_path / "python-here-site" / "torch.py").write_text(
        "from types import SimpleNamespace as Has\n"
        "float16 = float32 = None\n"
        "randn = randn_like = empty = empty_like = lambda *_, **__: Has(copy_=lambda _: None)\n"
        "mm = lambda *_, **__: None\n"
        "cuda = Has(set_device=lambda _: None, synchronize=lambda: None)\n"
    )
    machine = Machine(name="odd", way="local", python=python)
    (kind,) = found_cluster([machine], name="c", measure=True, reporter=SilentReporter()).cluster.kinds
    assert (kind.name, kind.power_w, kind.memory_bytes) == ("odd-7", 99, 8 * 2**30)
    assert kind.source.startswith("measured by spantrain init on odd, ")
    assert kind.peak_fp16_flop_per_s > 1e12
    (tmp_path / "python-here-site" / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open')")
    (kind,) = found_cluster([machine], name="c", measure=True, reporter=SilentReporter()).cluster.kinds
    assert kind.source.startswith("a guess, since torch cannot use it (libcudart.so.12: cannot open)")


def test_a_failure_is_exit_code_1_and_shown_with_what_to_do(tmp_path):
    done = RUN.invoke(app, ["doctor", "--quick", "--data", str(tmp_path / "nothing")])
    assert done.exit_code == 1
    assert re.search(r"fail data +\S+ +\S+nothing: missing\n +→ copy it there", done.stdout), done.stdout
    assert re.search(r"\d+ ok, \d+ warnings, [1-9]\d* failures", done.stdout)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["init", "--ssh", "a", "--slurm"], "give one of --ssh and --slurm"),
        (["init", "--slurm"], "SLURM_JOB_NODELIST is not set"),
        (["init", "--torchrun"], "RANK or LOCAL_RANK is not set"),
        (["init", "--torchrun", "--ssh", "a"], "give either --torchrun or --ssh"),
        (["init", "--ssh", "-oProxyCommand=x"], "cannot be reached by ssh"),
        (["init", "--site", "lab=nobody"], "no machine 'nobody'"),
        (["init", "--site", "lab"], "write NAME=MACHINE"),
        (["init", "--name", "a/b"], "is no name"),
        (["init", "--inventory", "none.yaml"], "there is no such file"),
        (["doctor", "--cluster", "none.yaml"], "there is no such file"),
        (["doctor", "--listen", "unix:/tmp/x"], "give HOST:PORT"),
        (["doctor", "--listen", "here"], "is not an address"),
    ],
)
def test_wrong_use_is_one_message_and_exit_code_2(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_JOB_NODELIST", "RANK"):
        monkeypatch.delenv(name, raising=False)
    code, error = refused(capsys, *words)
    assert code == 2
    assert said in error
    assert not (tmp_path / "cluster.yaml").exists()


def test_a_file_that_is_there_is_not_replaced(capsys, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("mine")
    code, error = refused(capsys, "init", "--out", str(path))
    assert code == 2
    assert "is there already" in error
    assert path.read_text() == "mine"


def test_machines_that_do_not_answer_are_all_named(capsys, tmp_path, monkeypatch):
    tool(tmp_path, "ssh", "echo 'ssh: connect to host: Connection refused' >&2; exit 255")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    code, error = refused(capsys, "init", "--ssh", "lab1,lab2", "--out", str(tmp_path / "c.yaml"))
    assert code == 1
    assert "2 of 2 machines did not answer" in error
    assert "make `ssh lab2 true` work without a question" in error
