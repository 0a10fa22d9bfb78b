"""A program gets to a machine and its answer back, within bounds, and every failure says what to do."""

import subprocess
import sys
import threading
import time

import pytest

from spantrain.errors import PeerLostError, ProtocolError, UsageError
from spantrain.reach.machines import Machine, RemoteProgram, at_once, run_python, this_machine
from testing.machines import by_ssh, interpreter, ssh_config, tool
from testing.patience import PATIENCE_S

HERE = this_machine("here")


def test_a_program_gets_its_words_and_its_output_comes_back():
    source = "import sys\nprint(sys.argv[1:], 'ä')\nprint(sys.stdin.read() == '')"
    assert run_python(HERE, source, "a b", "$HOME'", timeout_s=PATIENCE_S) == "['a b', \"$HOME'\"] ä\nTrue\n"


def test_lines_go_there_and_back():
    echo = "import sys\nfor line in sys.stdin:\n    print('got', line.strip(), flush=True)"
    with RemoteProgram(HERE, echo) as program:
        for word in ("one", "two"):
            program.send(word)
            assert program.line(time.monotonic() + PATIENCE_S) == f"got {word}"


def test_a_program_longer_than_a_pipe_holds_gets_there():
    assert run_python(HERE, f"x = {'a' * 200_000!r}\nprint(len(x))", timeout_s=PATIENCE_S) == "200000\n"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("print('x' * 3_000_000)", "printed more than 1048576 bytes"),
        ("import sys; sys.stdout.buffer.write(bytes([255, 254, 10]))", "no UTF-8"),
    ],
)
def test_what_is_no_answer_is_not_read_on(source, said):
    with pytest.raises(ProtocolError, match=said):
        run_python(HERE, source, timeout_s=PATIENCE_S)


def test_a_program_that_fails_or_is_silent_is_told_with_its_last_words():
    with pytest.raises(PeerLostError, match="here: the program ended with 1: ZeroDivisionError"):
        run_python(HERE, "1 / 0", timeout_s=PATIENCE_S)
    with pytest.raises(PeerLostError, match="no answer in time"):
        run_python(HERE, "import time; time.sleep(100)", timeout_s=0.01)


def test_each_way_has_its_words():
    words = ["python3", "-c", "print('a b')"]
    slurm = Machine(name="n", way="slurm", target="gpu03")
    pod = Machine(name="p", way="kubernetes", target="worker-0", options=("--namespace", "lab"))
    ssh = Machine(name="h", way="ssh", target="me@lab1", options=("-F", "file"))
    assert slurm.command(words)[-4:] == ["--nodelist=gpu03", *words]
    assert pod.command(words) == ["kubectl", "--namespace", "lab", "exec", "-i", "worker-0", "--", *words]
    assert ssh.command(words)[-3:] == ["--", "me@lab1", "python3 -c 'print('\"'\"'a b'\"'\"')'"]
    assert "BatchMode=yes" in ssh.command(words)


def test_an_interpreter_may_be_in_the_home_folder_of_its_machine(monkeypatch):
    """A tilde comes there as it is where the user's shell has left it, as in an inventory or behind `lab=`."""
    monkeypatch.setenv("HOME", "/home/me")
    words = ["~/my env/bin/python", "-c", "'~/x'"]
    ssh = Machine(name="h", way="ssh", target="lab1").command(words)[-1]
    said = subprocess.run(["sh", "-c", f"printf '%s|' {ssh}"], capture_output=True, check=True, text=True).stdout
    assert said == "/home/me/my env/bin/python|-c|'~/x'|"
    assert Machine(name="h", way="local").command(words)[0] == "/home/me/my env/bin/python"
    assert Machine(name="h", way="slurm", target="n1").command(words)[-3:-1] == ["/home/me/my env/bin/python", "-c"]


@pytest.mark.parametrize("target", ["", "-oProxyCommand=touch x", "lab\n1"])
def test_a_target_that_is_none_is_refused(target):
    with pytest.raises(ValueError, match="cannot be reached by ssh"):
        Machine(name="lab", way="ssh", target=target)


def test_a_way_whose_program_is_missing_is_the_users_to_mend(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="srun cannot be started"):
        run_python(Machine(name="n", way="slurm", target="n1"), "", timeout_s=PATIENCE_S)


@pytest.mark.parametrize(
    ("way", "skip"),
    [
        ("slurm", "while [ $1 != there ]; do shift; done; shift"),
        ("kubernetes", "while [ $1 != -- ]; do shift; done; shift"),
    ],
)
def test_srun_and_kubectl_run_it(way, skip, tmp_path, monkeypatch):
    name = {"slurm": "srun", "kubernetes": "kubectl"}[way]
    tool(tmp_path, name, f'echo {name} "$@" >&2; {skip}; exec "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    options = ("there",) if way == "slurm" else ()
    machine = Machine(name="n", way=way, target="n1", python=sys.executable, options=options)
    assert run_python(machine, "import sys\nprint(sys.argv[1:])", "a b", timeout_s=PATIENCE_S) == "['a b']\n"


def test_an_interrupt_waits_for_no_machine():
    def interrupted(number):
        if number == 0:
            raise KeyboardInterrupt
        run_python(HERE, "import time; time.sleep(1000)", timeout_s=1000, stop=stop)

    stop = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        at_once(interrupted, range(3), stop)
    assert stop.is_set()


def test_a_real_ssh_server_runs_it(tmp_path):
    machine = by_ssh("lab", ssh_config(tmp_path, {"lab": []}), interpreter(tmp_path))
    source = "import os, sys, spantrain\nprint('SSH_CONNECTION' in os.environ, sys.argv[1:])"
    assert run_python(machine, source, "a  'b' $HOME", timeout_s=PATIENCE_S) == "True [\"a  'b' $HOME\"]\n"
    assert machine.called() == "lab.test"


def test_ssh_that_asks_or_finds_nobody_says_which_command_must_work(tmp_path):
    config = ssh_config(tmp_path, {"lab": []})
    (tmp_path / "known_hosts").unlink()
    with pytest.raises(PeerLostError, match=r"cannot be reached: Host key.*make `ssh -F \S+ lab true` work"):
        run_python(by_ssh("lab", config, sys.executable), "", timeout_s=PATIENCE_S)


def test_a_machine_without_that_python_says_how_to_name_one(tmp_path):
    machine = by_ssh("lab", ssh_config(tmp_path, {"lab": []}), "/no/python")
    with pytest.raises(PeerLostError, match=r"has no /no/python.*name its interpreter with --python"):
        run_python(machine, "", timeout_s=PATIENCE_S)
