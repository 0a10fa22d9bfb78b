"""A device brings its files beside the steps with rests, and at once when it is told to."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from spantrain.errors import WorkerError
from spantrain.runtime.checkpoint import device_files
from spantrain.runtime.checkpoint.device_files import FileSender, bring, bring_all
from spantrain.runtime.control.data_requests import FileWanted, OfferFile, PutPiece
from spantrain.runtime.control.orders import BringOrder
from spantrain.runtime.control.requests import Done, Progress
from testing.patience import until

PIECES = 3
TOOK_S = 0.01


@dataclass
class SlowCoordinator:
    """Takes its time for each piece."""

    asked: list[object] = field(default_factory=list)
    wants: bool = True

    def ask(self, request: object) -> object:
        self.asked.append(request)
        if isinstance(request, PutPiece):
            time.sleep(TOOK_S)
            return FileWanted(wanted=sum(isinstance(one, PutPiece) for one in self.asked) < PIECES)
        return FileWanted(wanted=self.wants) if isinstance(request, OfferFile) else Done()

    @property
    def content(self) -> bytes:
        return b"".join(one.piece for one in self.asked if isinstance(one, PutPiece))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(device_files, "PIECE_BYTES", 10)
    path = tmp_path / "a-1.safetensors"
    path.write_bytes(bytes(range(10 * PIECES)))
    return path


def test_it_rests_three_times_as_long_as_each_piece_takes(file):
    rests: list[float] = []
    sender, coordinator = FileSender(SlowCoordinator()), SlowCoordinator()
    sender._control = coordinator
    sender._ended.wait = lambda rest_s: rests.append(rest_s)  # type: ignore[method-assign,assignment]
    sender.offer(file, 4)
    until(lambda: sender._thread is None)
    assert coordinator.content == file.read_bytes()
    assert rests
    assert all(rest_s >= 3 * TOOK_S for rest_s in rests)


def test_it_ends_when_its_order_does(file, monkeypatch):
    monkeypatch.setattr(device_files, "_REST", 1e6)
    coordinator = SlowCoordinator()
    sender = FileSender(coordinator)
    sender.offer(file, 4)
    until(lambda: coordinator.content)
    sender.end()
    until(lambda: sender._thread is None)
    assert coordinator.content != file.read_bytes()


@dataclass
class ChoosyCoordinator(SlowCoordinator):
    """Wants the file of one checkpoint, and then whatever comes."""

    first_step: int = 4

    def ask(self, request: object) -> object:
        self.asked.append(request)
        brought = any(isinstance(one, PutPiece) and one.step == self.first_step for one in self.asked)
        if isinstance(request, PutPiece):
            return FileWanted(wanted=True)
        if request.is_gone:
            self.first_step = -1
        return FileWanted(wanted=True) if brought or self.first_step < 0 else self._chosen(request)

    def _chosen(self, offer: OfferFile) -> FileWanted:
        wanted = offer.step == self.first_step
        return FileWanted(wanted=wanted, step=None if wanted else self.first_step)

    @property
    def brought(self) -> list[int]:
        return [one.step for one in self.asked if isinstance(one, PutPiece) and one.offset == 0]


def sent(coordinator: SlowCoordinator, held: dict[int, Path]) -> None:
    """Have a device bring what it has saved before it was asked."""
    sender = FileSender(coordinator)
    sender._held = dict(held)
    sender._bring_held()


def test_the_newest_comes_and_what_is_older_no_longer(file):
    coordinator = ChoosyCoordinator(first_step=8)
    sent(coordinator, {2: file, 4: file, 8: file})
    assert coordinator.brought == [8]


def test_the_one_comes_first_that_the_coordinator_waits_for(file):
    coordinator = ChoosyCoordinator()
    sent(coordinator, {2: file, 4: file, 6: file, 8: file})
    assert coordinator.brought == [4, 8]
    assert [one.step for one in coordinator.asked if isinstance(one, OfferFile)] == [8, 4, 8]


def test_what_is_wanted_later_is_offered_again(file, monkeypatch):
    monkeypatch.setattr(device_files, "_ASK_AGAIN_S", 0.01)
    coordinator = ChoosyCoordinator()
    sender = FileSender(coordinator)
    sender.offer(file, 8)
    until(lambda: len(coordinator.asked) > 3)
    assert not coordinator.brought
    coordinator.first_step = 8
    until(lambda: sender._thread is None)
    assert coordinator.brought == [8]
    sender.offer(file, 10)
    until(lambda: coordinator.brought == [8, 10])


def test_a_file_that_is_gone_is_said_to_be(file, tmp_path):
    coordinator = ChoosyCoordinator()
    sent(coordinator, {4: tmp_path / "gone", 8: file})
    assert coordinator.asked[2] == OfferFile(step=4, name="gone", is_gone=True)
    assert coordinator.brought == [8]


def test_of_what_is_not_wanted_nothing_goes(file):
    coordinator = SlowCoordinator(wants=False)
    bring(coordinator, file, 4)
    assert coordinator.asked == [OfferFile(step=4, name=file.name)]


def test_who_is_told_to_says_how_much_has_come(file, monkeypatch):
    monkeypatch.setattr(device_files, "_SAY_S", 0.0)
    coordinator = SlowCoordinator()
    bring_all(BringOrder(folder="", step=4, names=(file.name,)), file.parent, coordinator)
    assert coordinator.content == file.read_bytes()
    said = [one for one in coordinator.asked if isinstance(one, Progress)]
    assert [one.total for one in said] == [10 * PIECES] * len(said)
    assert [one.done for one in said] == [10, 20]


def test_a_file_that_is_gone_is_named(tmp_path):
    with pytest.raises(WorkerError, match=r"what was saved there cannot be read: .*gone\.safetensors"):
        bring_all(BringOrder(folder="", step=4, names=("gone.safetensors",)), tmp_path, SlowCoordinator())
