"""What the standby coordinator's worker asks: what its copy of the run's journal lacks."""

from dataclasses import dataclass

from spantrain.runtime.control.plane import Request

JOURNAL_FOLDER, JOURNAL_FILE, CREDENTIALS_FILE = "coordinator", "journal.jsonl", "credentials.json"
"""In a run's folder, on the coordinator's machine and on the standby coordinator's."""


@dataclass(frozen=True, kw_only=True)
class JournalPiece:
    """What comes next in a journal."""

    piece: bytes
    credentials: str = ""
    """What workers know the coordinator by, with the first piece."""
    saved_step: int = -1
    """The newest checkpoint, where its manifest is told; -1: none."""
    manifest: str = ""
    ended: bool = False
    """The run has ended, and its journal with it."""


@dataclass(frozen=True, kw_only=True)
class FollowJournal(Request[JournalPiece], name="follow_journal"):
    """Says how much of the journal is on the disk here, and asks for more."""

    offset: int
    """So many bytes are."""
    saved_step: int = -1
    """The newest checkpoint whose manifest is here; -1: none."""
    folder: str
    """Where the run lies here."""
