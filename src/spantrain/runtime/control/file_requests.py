"""What workers ask about files of checkpoints that the coordinator's machine is to have, or has alone."""

from dataclasses import dataclass

from spantrain.runtime.control.plane import OrderRequest

PIECE_BYTES = 2**20
"""Of a file, in one message, at most."""


@dataclass(frozen=True, kw_only=True)
class FileWanted:
    """Whether the coordinator's machine is to have a file, or what is left of it."""

    wanted: bool
    step: int | None = None
    """The checkpoint whose files come now, where one of a later checkpoint was offered: that may be offered again."""


@dataclass(frozen=True, kw_only=True)
class OfferFile(OrderRequest[FileWanted], name="offer_file"):
    """Asks whether the coordinator's machine lacks a file that this device has saved, and takes it now."""

    step: int
    name: str
    is_gone: bool = False
    """It cannot be read any longer: nobody is to wait for it."""


@dataclass(frozen=True, kw_only=True)
class PutPiece(OrderRequest[FileWanted], name="put_piece"):
    """Brings the next bytes of a file that is wanted."""

    step: int
    name: str
    offset: int
    """Of the first byte."""
    piece: bytes


@dataclass(frozen=True, kw_only=True)
class FilePiece:
    """Bytes of a file, none behind its end."""

    piece: bytes


@dataclass(frozen=True, kw_only=True)
class FetchPiece(OrderRequest[FilePiece], name="fetch_piece"):
    """Asks for bytes of a file of the checkpoint that the run began with."""

    name: str
    offset: int
