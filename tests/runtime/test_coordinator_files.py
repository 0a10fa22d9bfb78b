"""Files of checkpoints that come to the coordinator's machine: whole and as they were said to be, or not at all."""

import hashlib
from collections import namedtuple
from pathlib import Path

import pytest

from spantrain.core.checkpoint import StoredFile
from spantrain.errors import ProtocolError
from spantrain.runtime.checkpoint import coordinator_files
from spantrain.runtime.checkpoint.coordinator_files import CoordinatorFiles
from spantrain.runtime.checkpoint.tensor_file import Disk
from spantrain.runtime.control.data_requests import PIECE_BYTES, FetchPiece, FileWanted, OfferFile, PutPiece
from spantrain.runtime.control.requests import SavedFile
from spantrain.transport.control.protocol import RemoteRefusal

CONTENT = bytes(range(256)) * 40
HALF = len(CONTENT) // 2


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def files(tmp_path: Path, told: list[str]) -> CoordinatorFiles:
    found = CoordinatorFiles(tmp_path, takes=True, tell=told.append, devices=("a", "b"))
    for step in (3, 6):
        for device in ("a", "b"):
            stored = StoredFile(
                device=device, sha256=hashlib.sha256(CONTENT).hexdigest(), size_bytes=len(CONTENT), tensors={}
            )
            found.saved(SavedFile(step=step, name=f"{device}.safetensors", file=stored, scalars={}))
    return found


def answered(files: CoordinatorFiles, device: str, step: int = 3, **more: bool) -> FileWanted:
    return files.answer(device, OfferFile(step=step, name=f"{device}.safetensors", **more))


def offered(files: CoordinatorFiles, device: str, step: int = 3, **more: bool) -> bool:
    return answered(files, device, step, **more).wanted


def put(files: CoordinatorFiles, device: str, offset: int, piece: bytes, step: int = 3) -> bool:
    return files.answer(device, PutPiece(step=step, name=f"{device}.safetensors", offset=offset, piece=piece)).wanted


def test_a_file_comes_in_pieces_and_is_there_when_it_is_whole(files, tmp_path):
    assert offered(files, "a")
    assert put(files, "a", 0, CONTENT[:HALF])
    assert put(files, "a", 0, CONTENT[:HALF]), "what is asked twice is not taken twice"
    assert not (tmp_path / "step-3/a.safetensors").exists()
    assert not put(files, "a", HALF, CONTENT[HALF:])
    assert (tmp_path / "step-3/a.safetensors").read_bytes() == CONTENT
    assert not offered(files, "a"), "it is here"
    assert files.taken_bytes == len(CONTENT)
    assert [path.name for path in (tmp_path / "step-3").iterdir()] == ["a.safetensors"]


def test_files_of_one_checkpoint_come_after_all_those_of_another(files, told):
    assert offered(files, "a")
    assert put(files, "a", 0, CONTENT[:HALF])
    assert answered(files, "b", step=6) == FileWanted(wanted=False, step=3), "those of the one before come"
    assert offered(files, "b")
    assert not put(files, "b", 0, CONTENT)
    assert files.is_busy
    assert not put(files, "a", HALF, CONTENT[HALF:])
    assert not files.is_busy
    assert offered(files, "b", step=6)
    assert answered(files, "a", step=3) == FileWanted(wanted=False), "nobody goes back to it"
    assert not told


def test_a_checkpoint_is_waited_for_until_the_files_of_all_devices_are_here(files):
    assert offered(files, "a")
    assert not put(files, "a", 0, CONTENT)
    assert answered(files, "a", step=6) == FileWanted(wanted=False, step=3), "b has yet to bring its own"
    assert offered(files, "b")
    assert not put(files, "b", 0, CONTENT)
    assert offered(files, "a", step=6)


def test_the_checkpoint_that_comes_is_known_however_many_are_saved_meanwhile(files):
    assert offered(files, "a")
    for step in range(7, 20):
        stored = StoredFile(device="a", sha256="0" * 64, size_bytes=1, tensors={})
        files.saved(SavedFile(step=step, name="a.safetensors", file=stored, scalars={}))
    assert not put(files, "a", 0, CONTENT)
    assert offered(files, "b")
    with pytest.raises(RemoteRefusal, match="has saved no"):
        offered(files, "b", step=6)


def test_a_checkpoint_of_which_a_file_cannot_be_read_is_waited_for_no_longer(files, tmp_path):
    assert offered(files, "a")
    assert put(files, "a", 0, CONTENT[:HALF])
    assert not offered(files, "b", is_gone=True)
    assert not put(files, "a", HALF, CONTENT[HALF:])
    assert not list((tmp_path / "step-3").iterdir())
    assert answered(files, "a") == FileWanted(wanted=False)
    assert offered(files, "a", step=6)


def test_a_device_that_gives_one_up_begins_again(files):
    assert offered(files, "a")
    assert put(files, "a", 0, CONTENT[:HALF])
    assert answered(files, "a", step=6).step == 3
    assert not put(files, "a", HALF, CONTENT[HALF:])
    assert offered(files, "a")


def test_a_device_that_begins_again_brings_all_of_it(files, tmp_path):
    assert offered(files, "a")
    assert put(files, "a", 0, CONTENT[:HALF])
    assert offered(files, "a")
    assert not put(files, "a", 0, CONTENT)
    assert (tmp_path / "step-3/a.safetensors").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("offset", "piece", "words"),
    [
        (1, b"x", "1 bytes came for place 1"),
        (0, b"", "0 bytes came"),
        (0, bytes(PIECE_BYTES + 1), "came for place 0"),
        (0, CONTENT + b"x", f"{len(CONTENT) + 1} bytes came of {len(CONTENT)}"),
        (0, CONTENT[::-1], "another SHA-256 than device a has said"),
    ],
)
def test_something_else_than_was_said_is_refused(files, tmp_path, offset, piece, words):
    assert offered(files, "a")
    with pytest.raises(ProtocolError, match=words):
        put(files, "a", offset, piece)
    if "SHA-256" in words:
        assert offered(files, "a", step=6), "that one is waited for no longer"
    files.close()
    assert not list((tmp_path / "step-3").iterdir())


def test_nobody_brings_what_another_has_saved_or_what_nobody_has(files):
    for request in (
        OfferFile(step=3, name="a.safetensors"),
        PutPiece(step=3, name="a.safetensors", offset=0, piece=b"x"),
    ):
        with pytest.raises(RemoteRefusal, match=r"device b has saved no a\.safetensors after 3 steps"):
            files.answer("b", request)
    with pytest.raises(RemoteRefusal, match="has saved no"):
        files.answer("a", OfferFile(step=4, name="a.safetensors"))
    with pytest.raises(RemoteRefusal, match="has saved no"):
        files.answer("a", OfferFile(step=3, name="../../a.safetensors"))


def test_a_disk_that_is_full_is_told_of_once_and_nothing_is_taken_any_more(files, tmp_path, told, monkeypatch):
    assert offered(files, "a")

    def full(_disk: Disk, _stream: object, _data: bytes) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Disk, "append", full)
    assert not put(files, "a", 0, CONTENT)
    assert not offered(files, "b")
    assert len(told) == 1
    assert "cannot be taken here: No space left on device; they stay where they are" in told[0]
    assert not list((tmp_path / "step-3").iterdir())


def test_where_there_is_little_room_nothing_is_begun(files, told, monkeypatch):
    usage = namedtuple("usage", "total used free")(2**40, 0, len(CONTENT))
    monkeypatch.setattr(coordinator_files.shutil, "disk_usage", lambda _folder: usage)
    assert not offered(files, "a")
    assert "no room for 10 KiB" in told[0]


def test_where_files_are_to_stay_none_is_wanted(tmp_path, files):
    files.close()
    assert not offered(files, "a")


def test_what_a_run_begins_with_is_given_and_nothing_else(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(CONTENT)
    (tmp_path / "secret").write_text("x")
    begins_with = {name: tmp_path / name for name in ("a.safetensors", "gone.safetensors")}
    files = CoordinatorFiles(tmp_path / "out", takes=True, tell=print, begins_with=begins_with)
    assert files.answer("d", FetchPiece(name="a.safetensors", offset=0)).piece == CONTENT
    assert files.answer("d", FetchPiece(name="a.safetensors", offset=HALF)).piece == CONTENT[HALF:]
    assert files.answer("d", FetchPiece(name="a.safetensors", offset=len(CONTENT))).piece == b""
    for name, offset in (("secret", 0), ("../secret", 0), ("a.safetensors", -1)):
        with pytest.raises(RemoteRefusal, match="begins with no file"):
            files.answer("d", FetchPiece(name=name, offset=offset))
    with pytest.raises(RemoteRefusal, match=r"gone.safetensors: cannot be read on the coordinator's machine"):
        files.answer("d", FetchPiece(name="gone.safetensors", offset=0))
