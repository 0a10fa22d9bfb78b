"""The tutorial, word by word: what it tells to type is typed, in its order, and its outputs are what comes.

The home and the folder are new and empty, and the environment has nothing else in it. `~/spantrain` stands in for what
`pip install` has put there: this program. Two machines are network namespaces with host names of their own and an sshd.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import spantrain
from preloaded import ADDRESS, start
from testing.machines import joined, ssh_config, sshd_words, tool, wait_for_sshd
from testing.pages import ROOT, difference, shown_in
from testing.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text("utf-8")
SOURCES = Path(spantrain.__path__[0]).parent
PLACES = ("desk", "lab")
START = f"""
import subprocess, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
import preloaded
preloaded.install()
sys.exit(subprocess.Popen([sys.executable, "-m", "spantrain", *sys.argv[1:]]).wait())
"""


@pytest.fixture
def home(tmp_path) -> Path:
    home = tmp_path / "home"
    binaries = home / "spantrain" / "bin"
    (home / "work").mkdir(parents=True)
    (home / "start.py").write_text(START)
    tool(binaries, "python", f'HOME={home} PYTHONPATH={SOURCES} exec {sys.executable} "$@"')
    tool(binaries, "spantrain", f'PYTHONPATH={SOURCES} exec {sys.executable} {home / "start.py"} "$@"')
    return home


def follow(section: str, home: Path, forked_by: str, before: Sequence[str] = ()) -> None:
    """Type what a section says; the program is forked by a process with torch loaded, if there is an address of one."""
    environment = {
        "HOME": str(home),
        "PATH": f"{home / 'spantrain' / 'bin'}:{os.environ['PATH']}",
        "LANG": "C.UTF-8",
        "COLUMNS": "100",
        ADDRESS: forked_by,
    }
    shown = list(shown_in(TUTORIAL, section))
    assert shown
    for one in shown:
        ended = subprocess.run(
            [*before, "bash", "-c", one.command], cwd=home / "work", env=environment, timeout=PATIENCE_S, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        where = f"docs/tutorial.md:{one.line}: $ {one.command}"
        assert ended.returncode == 0, f"{where}\n{ended.stdout}"
        found = difference(one.output, ended.stdout.replace(str(home), "~"))
        assert not found, f"{where}\n{found}"


def test_one_machine(home):
    follow("One machine", home, start())


@pytest.fixture
def desk(home) -> Iterator[Sequence[str]]:
    """The words before a command at the desk, from which `ssh lab` leads to another machine."""
    if shutil.which("nvidia-smi"):
        pytest.skip("the tutorial's machines have no GPU, and this one has")
    with joined(PLACES, latency_s=0.01, folder=home.parent) as network:
        config = ssh_config(home, {"lab": network.address("lab")})
        tool(home / "spantrain" / "bin", "ssh", f'exec {shutil.which("ssh")} -F {config} "$@"')
        server = network.popen("lab", [*called("lab"), *sshd_words(home, "-D")], stderr=subprocess.DEVNULL)
        wait_for_sshd(network, ("lab",))
        yield [*network.namespace("desk").command([]), *called("desk")]
        server.kill()
        server.wait()


def called(name: str) -> list[str]:
    """Return the words before a command on a machine of this name."""
    return ["unshare", "--uts", "sh", "-c", f'hostname {shlex.quote(name)} && exec "$@"', "sh"]


@pytest.mark.root
def test_two_machines(home, desk):
    follow("Two machines", home, "", desk)  # what is forked would be in the network of the process that forks
