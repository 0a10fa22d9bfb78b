"""A standby coordinator's copy of a journal: whole before steps go on, and gone when the run is."""

import fcntl
import stat
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from spantrain.errors import Interrupted, PeerLostError
from spantrain.runtime.control.data_requests import FollowJournal, JournalPiece
from spantrain.runtime.coordinator import journal_feed
from spantrain.runtime.coordinator.journal_feed import JournalFeed
from spantrain.runtime.worker.journal_copy import JournalCopy
from spantrain.transport.control.protocol import RemoteRefusal
from testing.patience import until

KEEPER = "lab-0"
LINE = b'{"kind": "CommittedStep"}\n'


@dataclass
class Way:
    """From the copy to the feed, with what may happen there."""

    feed: JournalFeed
    stalled: bool = False
    interrupted: int = 0
    lost: bool = False

    def ask(self, request: FollowJournal) -> JournalPiece:
        while True:
            until(lambda: not self.stalled or self.lost)
            if self.lost:
                raise PeerLostError("the coordinator was lost")
            if self.interrupted:
                self.interrupted -= 1
                raise Interrupted("the order is over")
            if (answer := self.feed.answer(KEEPER, request)) is not None and not self.stalled:
                return answer


@dataclass
class Run:
    """A journal that is written here, and its copy."""

    folder: Path
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.path = self.folder / "journal.jsonl"
        self.feed = JournalFeed(KEEPER, "secret", self.told.append)
        self.way = Way(self.feed)
        self.there = self.folder / "there/run/coordinator"

    def copy(self) -> JournalCopy:
        return JournalCopy(self.way, self.there.parent)

    def write(self, *lines: bytes) -> None:
        with self.path.open("ab") as journal:
            journal.write(b"".join(lines))
        self.feed.written(self.path, self.path.stat().st_size)

    @property
    def copied(self) -> bytes:
        path = self.there / "journal.jsonl"
        return path.read_bytes() if path.exists() else b""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_feed, "HOLD_S", 0.05)
    found = Run(tmp_path)
    yield found
    found.way.lost = True


def test_a_step_goes_on_when_its_line_is_on_the_other_machine(run):
    run.write(LINE)
    copy = run.copy()
    until(lambda: run.told)
    for number in range(1, 20):
        run.write(LINE)
        assert run.copied == LINE * (number + 1)
    credentials = run.there / "credentials.json"
    assert credentials.read_text() == "secret"
    assert stat.S_IMODE(credentials.stat().st_mode) == 0o600
    assert stat.S_IMODE(run.there.stat().st_mode) == 0o700
    assert len(run.told) == 1
    assert run.told[0].startswith("lab-0 has a copy of the journal: should this machine be lost, go on there by ")
    assert f"spantrain train --resume {run.there.parent} --steps N" in run.told[0]
    run.way.lost = True
    until(lambda: not copy._thread.is_alive())
    assert run.copied == LINE * 20


def test_a_journal_larger_than_a_message_comes_in_pieces(run, monkeypatch):
    monkeypatch.setattr(journal_feed, "_PIECE_BYTES", 10)
    run.write(LINE * 9)
    run.copy()
    until(lambda: run.told)
    assert run.copied == LINE * 9


def test_steps_do_not_wait_for_a_copy_that_is_behind_until_it_is_whole_again(run, monkeypatch):
    monkeypatch.setattr(journal_feed, "_PATIENCE_S", 0.05)
    run.write(LINE)
    run.copy()
    until(lambda: run.told)
    run.way.stalled = True
    for _ in range(3):
        run.write(LINE)
    assert len(run.told) == 2
    assert "The copy of the journal on lab-0 is behind: steps do not wait for it" in run.told[1]
    run.way.stalled = False
    until(lambda: len(run.told) == 3)
    assert run.copied == LINE * 4


def test_the_newest_checkpoints_manifest_is_there_too(run, monkeypatch):
    checkpoints = run.there.parent / "checkpoint"
    run.write(LINE)
    run.copy()
    for step in (3, 6):
        run.feed.saved(step, f"manifest {step}")
        until((checkpoints / f"step-{step}/manifest.json").exists)
        (checkpoints / f"step-{step}/own.safetensors").touch()
    until(lambda: not (checkpoints / "step-3/manifest.json").exists())
    assert (checkpoints / "latest").read_text() == "step-6\n"
    assert (checkpoints / "step-6/manifest.json").read_text() == "manifest 6"
    for step in (6, 3):  # all went back, and save again what they had saved
        run.feed.saved(step, "again")
        until(lambda at=checkpoints / f"step-{step}/manifest.json": at.exists() and at.read_text() == "again")
    until(lambda: not (checkpoints / "step-6/manifest.json").exists())
    assert (checkpoints / "latest").read_text() == "step-3\n"
    monkeypatch.setattr(journal_feed, "_MOST_MANIFEST", 3)
    run.feed.saved(9, "manifest 9")
    run.write(LINE)
    assert not (checkpoints / "step-9").exists()
    assert run.told[-1] == "lab-0 is not told of the checkpoint after 9 steps: its manifest is too large"


def test_it_goes_when_the_run_ends(run):
    run.write(LINE)
    copy = run.copy()
    run.feed.saved(3, "manifest")
    until((run.there.parent / "checkpoint/latest").exists)
    run.feed.end()
    until(lambda: not copy._thread.is_alive())
    assert not any(path.is_file() for path in run.there.parent.rglob("*"))


def test_it_goes_on_after_an_order_has_ended_and_begins_anew_under_another_coordinator(run):
    run.write(LINE)
    run.way.interrupted = 1
    first = run.copy()
    until(lambda: run.told)
    run.way.lost = True
    first.close()
    again = Run(run.folder)
    copy = again.copy()
    again.write(b'{"kind": "another line"}\n')
    until(lambda: again.told)
    assert again.copied == run.path.read_bytes()
    again.way.lost = True
    copy.close()
    run.path.write_bytes(b"")
    shorter = Run(run.folder)
    shorter.write(b"short\n")
    shorter.copy()
    until(lambda: shorter.told)
    assert shorter.copied == b"short\n"
    shorter.way.lost = True


def test_what_another_program_writes_is_left_alone(run):
    run.there.mkdir(parents=True)
    own = run.there / "journal.jsonl"
    own.write_bytes(b"own\n")
    run.write(LINE)
    with own.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        copy = run.copy()
        until(lambda: not copy._thread.is_alive())
    assert run.copied == b"own\n"


@pytest.mark.parametrize(("device", "offset"), [("lab-1", 0), (KEEPER, 1000), (KEEPER, -1)])
def test_nobody_else_is_given_it(run, device, offset):
    run.write(LINE)
    with pytest.raises(RemoteRefusal, match="keeps no copy of the journal"):
        run.feed.answer(device, FollowJournal(offset=offset, folder="/r"))
