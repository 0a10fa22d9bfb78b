"""Workers on a machine: heard, ended with whoever started them, with code that comes once; the machine is this one."""

import contextlib
import hashlib
import io
import os
import queue
import signal
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator

import psutil
import pytest

from spantrain.errors import ConfigError, PeerLostError, UsageError
from spantrain.reach.code import PackedCode
from spantrain.reach.kept import KeptMachine
from spantrain.reach.machines import Machine, this_machine
from spantrain.reach.programs import keeper
from testing.machines import tool
from testing.patience import PATIENCE_S, until

FOREVER = ["-c", "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"]


class Heard:
    """What workers have said, and how they ended."""

    def __init__(self) -> None:
        self.lines: queue.Queue[tuple[str, str]] = queue.Queue()
        self.ends: queue.Queue[tuple[str, str]] = queue.Queue()

    def line(self) -> tuple[str, str]:
        return self.lines.get(timeout=PATIENCE_S)

    def end(self) -> tuple[str, str]:
        return self.ends.get(timeout=PATIENCE_S)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def kept(heard, tmp_path, monkeypatch) -> Iterator[Callable[..., KeptMachine]]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with contextlib.ExitStack() as stack:

        def make(machine: Machine | None = None, *within: str) -> KeptMachine:
            found = KeptMachine(
                machine or this_machine("lab"),
                within=within,
                heard=lambda *said: heard.lines.put(said),
                ended=lambda *how: heard.ends.put(how),
            )
            stack.callback(found.close)
            return found

        yield make


def is_gone(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        psutil.Process(pid).wait(PATIENCE_S)
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_one_that_is_cut_off_while_it_is_started_is_told_once(kept, heard, tmp_path, monkeypatch):
    """Else it would be started again twice, and the second would be refused, and taken for the first one's end."""
    tool(tmp_path, "ssh", "sleep 0.3; exit 255")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    machine, told = kept(Machine(name="lab", way="ssh", target="lab")), []
    try:
        machine.start("a", FOREVER, {})
    except PeerLostError as error:
        told.append(str(error))
    until(lambda: machine.is_cut_off)
    told += [how for _, how in iter(lambda: heard.ends.get_nowait() if heard.ends.qsize() else None, None)]
    assert len(told) == 1
    assert "cannot be reached" in told[0]


def test_what_workers_print_and_how_they_end_is_heard(kept, heard):
    machine = kept()
    machine.start("a", ["-c", "import os, sys; print(os.environ['TOLD']); sys.exit(3)"], {"TOLD": "x"})
    assert heard.line() == ("a", "x")
    assert heard.end() == ("a", "its worker ended with status 3")
    machine.start("b", ["-c", "import os; os.kill(os.getpid(), 9)"], {})
    assert heard.end() == ("b", "its worker was killed by signal 9")


def test_a_secret_is_in_no_command_line(kept, heard):
    kept().start("a", FOREVER, {"TOLD": "a-secret"})
    pid = int(heard.line()[1])
    words = [word for process in (psutil.Process(pid), *psutil.Process(pid).parents()) for word in process.cmdline()]
    assert not any("a-secret" in word for word in words)


def test_workers_end_when_it_is_closed(kept, heard):
    machine = kept()
    machine.start("a", FOREVER, {})
    machine.start("b", ["-c", "import signal, time; signal.signal(2, signal.SIG_IGN);" + FOREVER[1]], {})
    pids = [int(heard.line()[1]) for _ in range(2)]
    machine.close()
    assert all(map(is_gone, pids))
    assert heard.ends.empty(), "that was expected"


def test_workers_end_with_what_keeps_them(kept, heard):
    machine = kept()
    machine.start("a", FOREVER, {})
    pid = int(heard.line()[1])
    os.kill(psutil.Process(pid).ppid(), signal.SIGKILL)
    name, how = heard.end()
    assert (name, how.partition(":")[0]) == ("a", "its machine lab is cut off")
    assert is_gone(pid)


def test_workers_end_with_a_program_that_is_killed(heard, plain_processes):
    """It has started them, and can say nothing any more."""
    code = (
        "import sys, time\n"
        "from spantrain.reach.kept import KeptMachine\nfrom spantrain.reach.machines import this_machine\n"
        "said = lambda name, line: print(line, flush=True)\n"
        "machine = KeptMachine(this_machine('lab'), heard=said, ended=lambda *_: None)\n"
        f"machine.start('a', {FOREVER!r}, {{}})\ntime.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        program.kill()
    assert is_gone(pid)


def test_what_a_login_prints_is_not_taken_for_an_answer(kept, heard):
    machine = kept(None, "sh", "-c", 'echo welcome; echo "{}"; exec "$@"', "sh")
    machine.start("a", ["-c", "print('here')"], {})
    assert heard.line() == ("a", "here")


def test_lines_are_left_out_of_the_worker_that_printed_them(monkeypatch):
    """Whose output is not sent on as fast as it comes; another one is told nothing of it."""
    monkeypatch.setattr(keeper.Keeper, "_send", lambda _self: None)
    monkeypatch.setattr(keeper, "_MOST_WAITING", 4)
    keeps = keeper.Keeper()
    for name, lines in (("loud", 9), ("quiet", 0)):
        worker = subprocess.Popen([sys.executable, "-c", f"print('x\\n' * {lines}, end='')"], stdout=subprocess.PIPE)
        worker.wait()
        follows = threading.Thread(target=keeps._follow, args=(name, worker), daemon=True)
        follows.start()
        # It has told of the end, or waits for room to do so.
        until(lambda follows=follows: keeps._outgoing.not_full._waiters or not follows.is_alive())
        told = {}
        while "ended" not in told:
            told = keeps._outgoing.get(timeout=PATIENCE_S)
        assert (told["worker"], told["left_out"] > 0) == (name, lines > 0)


def test_a_worker_that_prints_faster_than_is_sent_does_not_wait(kept, heard):
    kept().start("a", ["-c", "for number in range(100_000): print(number)"], {})
    assert heard.end() == ("a", "its worker ended with status 0")


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        (Machine(name="lab", way="local", python="no-such-python"), "no-such-python cannot be started"),
        (Machine(name="lab", way="local", python="/bin/false"), "the program ended with 1"),
    ],
)
def test_why_there_is_no_answer_is_said(kept, machine, says):
    with pytest.raises((UsageError, PeerLostError), match=says):
        kept(machine).look([], [])


def test_what_is_not_there_is_named(kept, tmp_path):
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "own_module.py").touch()
    modules, paths = ("json", "no_such_module", "own_module"), (str(tmp_path), str(tmp_path / "data"))
    machine = kept()
    assert machine.look(modules, paths) == (("no_such_module", "own_module"), (str(tmp_path / "data"),))
    assert machine.look(modules, (), python_path=str(tmp_path / "library")) == (("no_such_module",), ())


def test_code_comes_once_and_workers_import_it(kept, heard, tmp_path):
    folder = tmp_path / "code"
    (folder / "package" / "__pycache__").mkdir(parents=True)
    (folder / "package" / "__init__.py").write_text("said = 'from the code'\n")
    for left_out in (folder / "package" / "__pycache__" / "x.pyc", folder / ".git" / "config"):
        left_out.parent.mkdir(exist_ok=True)
        left_out.touch()
    code = PackedCode.of(folder)
    first = kept()
    assert first.place(code)
    assert first.look(["package"], []) == ((), ())
    first.start("a", ["-c", "import package; print(package.said)"], {})
    assert heard.line() == ("a", "from the code")
    assert not kept().place(code)
    placed = keeper.code_folder(code.digest)
    assert [path.relative_to(placed).as_posix() for path in placed.rglob("*.py")] == ["package/__init__.py"]
    assert not [*placed.rglob("x.pyc"), *placed.rglob(".git")]
    assert [path.name for path in placed.parent.iterdir()] == [code.digest]


def test_equal_code_has_one_digest_and_a_wheel_is_code_too(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name / "package").mkdir(parents=True)
        (tmp_path / name / "package" / "__init__.py").write_text("x = 1\n")
    with zipfile.ZipFile(tmp_path / "package-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("package/__init__.py", "x = 1\n")
    places = (tmp_path / "one", tmp_path / "other", tmp_path / "package-1-py3-none-any.whl")
    assert len({PackedCode.of(place).digest for place in places}) == 1
    assert PackedCode.of(places[0]).inside(places[0] / "package" / "x.py") == "package/x.py"
    assert PackedCode.of(places[0]).inside(tmp_path / "x.py") is None


def test_what_is_no_code_or_too_much_is_refused(tmp_path):
    (tmp_path / "code").mkdir()
    with (tmp_path / "code" / "data.bin").open("wb") as file:
        file.truncate(2**29)
    with pytest.raises(ConfigError, match=r"with data.bin it is more than the 64 MiB .* data are not copied"):
        PackedCode.of(tmp_path / "code")
    (tmp_path / "broken.whl").write_text("no archive")
    for path in (tmp_path / "broken.whl", tmp_path / "missing", tmp_path / "code" / "data.bin"):
        with pytest.raises(ConfigError, match=f"--code {path}: "):
            PackedCode.of(path)


@pytest.mark.parametrize("kind", ["above", "absolute", "link", "digest"])
def test_an_archive_that_would_write_elsewhere_is_refused_whole(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    entry = tarfile.TarInfo({"above": "../x", "absolute": "/x"}.get(kind, "x"))
    if kind == "link":
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        archive.addfile(entry, io.BytesIO())
    packed = raw.getvalue()
    digest = hashlib.sha256(b"other" if kind == "digest" else packed).hexdigest()
    with pytest.raises(ValueError, match="damaged" if kind == "digest" else "is nothing that code has"):
        keeper.place_code(digest, packed)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
