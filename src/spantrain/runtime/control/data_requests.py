"""What workers ask about data that comes in pieces: files of checkpoints that the coordinator's machine is to have, or
has alone; batches that a user's own loop gives (`runtime.coordinator.batches`); the journal, for the standby
coordinator's worker.
"""

from enum import StrEnum

from spantrain.core.records import Record
from spantrain.runtime.control.plane import OrderRequest, Request

PIECE_BYTES = 2**20
"""Of a file, in one message, at most."""


class FileWanted(Record):
    """Whether the coordinator's machine is to have a file, or what is left of it."""

    wanted: bool
    step: int | None = None
    """The checkpoint whose files come now, where one of a later checkpoint was offered: that may be offered again."""


class OfferFile(OrderRequest[FileWanted], name="offer_file"):
    """Asks whether the coordinator's machine lacks a file that this device has saved, and takes it now."""

    step: int
    name: str
    is_gone: bool = False
    """It cannot be read any longer: nobody is to wait for it."""


class NotSaved(OrderRequest[FileWanted], name="not_saved"):
    """Says that this device's disk has no room for its part of a checkpoint."""

    step: int
    why: str


class PutPiece(OrderRequest[FileWanted], name="put_piece"):
    """Brings the next bytes of a file that is wanted."""

    step: int
    name: str
    offset: int
    """Of the first byte."""
    piece: bytes


class FilePiece(Record):
    """Bytes of a file, none behind its end."""

    piece: bytes


class FetchPiece(OrderRequest[FilePiece], name="fetch_piece"):
    """Asks for bytes of a file of the checkpoint that the run began with."""

    name: str
    offset: int


class NextStep(StrEnum):
    """What the loop wants of all devices."""

    WAIT = "wait"
    GO = "go"
    """Run the step: its batch is there."""
    SAVE = "save"
    """Write a checkpoint, then ask again."""
    STOP = "stop"


class NextStepAnswer(Record):
    """What to do next."""

    next: NextStep


class AskNextStep(OrderRequest[NextStepAnswer], name="next_step"):
    """Asks what to do before a step."""

    step: int
    saved: bool
    """Whether a checkpoint was written before it."""


class BatchPiece(Record):
    """Bytes of a safetensors file with rows of a batch."""

    piece: bytes
    total: int
    """Bytes of the file."""


class FetchRows(OrderRequest[BatchPiece], name="batch_rows"):
    """Asks for rows of a step's batch."""

    step: int
    part: str
    """`inputs`, `labels`, `counted` or `counted each` (`models.units.counted_labels`, for one sample)."""
    lo: int
    hi: int
    offset: int
    """Of the first byte that is wanted."""


JOURNAL_FOLDER, JOURNAL_FILE, CREDENTIALS_FILE = "coordinator", "journal.jsonl", "credentials.json"
"""In a run's folder, on the coordinator's machine and on the standby coordinator's."""


class JournalPiece(Record):
    """What comes next in a journal."""

    piece: bytes
    credentials: str = ""
    """What workers know the coordinator by, with the first piece."""
    manifest: str = ""
    """Of the newest checkpoint; empty: it is known."""
    manifest_step: int = 0
    manifests: int = 0
    """How many checkpoints were complete with that one; steps may be trained and saved again."""
    ended: bool = False
    """The run has ended, and its journal with it."""


class FollowJournal(Request[JournalPiece], name="follow_journal"):
    """Says how much of the journal is on the disk here, and asks for more."""

    offset: int
    """So many bytes are."""
    manifests: int = 0
    """How many checkpoints were complete with the newest one whose manifest is here."""
    folder: str
    """Where the run lies here."""
