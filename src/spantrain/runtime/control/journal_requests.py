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
    manifest: str = ""
    """Of the newest checkpoint; empty: it is known."""
    manifest_step: int = 0
    manifests: int = 0
    """How many checkpoints were complete with that one; steps may be trained and saved again."""
    ended: bool = False
    """The run has ended, and its journal with it."""


@dataclass(frozen=True, kw_only=True)
class FollowJournal(Request[JournalPiece], name="follow_journal"):
    """Says how much of the journal is on the disk here, and asks for more."""

    offset: int
    """So many bytes are."""
    manifests: int = 0
    """How many checkpoints were complete with the newest one whose manifest is here."""
    folder: str
    """Where the run lies here."""
