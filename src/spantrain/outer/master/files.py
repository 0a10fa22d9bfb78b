"""What outlives a master, in a folder of its own: who it is, the model's layout, and its small state.

credentials.json  its certificate, authority and token
token             the token alone, for whoever starts shards and clusters
layout.json       the model, as the first cluster described it, and which shard holds what
state.json        of each fragment versions, tokens and the guard's numbers; leases of chunks
lock              held while a master runs

All are for their owner's eyes, and written so that they are never half there.
"""

from pathlib import Path
from typing import TypeVar

from spantrain.config.files.json_codec import from_json, render_json, to_json
from spantrain.config.files.parsing import parse_json
from spantrain.config.files.text_files import locked_file, make_private_folder, read_private, write_atomically
from spantrain.core.outer.layers import ShardLayout, fragment_layouts
from spantrain.errors import SpanTrainError, UsageError
from spantrain.outer.master.config import MasterConfig
from spantrain.outer.policy.fragments import FragmentedState
from spantrain.transport.control.credentials import Credentials

T = TypeVar("T")
_REMEDY = "take it from a copy, or begin with another folder"
_OLD = f"it is damaged, or an older version of this program wrote it: {_REMEDY}, also for the shards"


class StateNotKept(SpanTrainError):
    """The master's state could not be written: it must not go on, or it might promise what it then forgets."""


def token_file(state_dir: Path) -> Path:
    """Return where a master with this folder writes its token."""
    return state_dir / "token"


class MasterFiles:
    """The folder, for one master at a time."""

    def __init__(self, folder: Path) -> None:
        """Take the folder; make it if it is not there.

        Raises:
            UsageError: another master has it, or it cannot be made or written, or is damaged.
        """
        make_private_folder(folder)
        self._folder = folder
        try:
            (folder / "lock").touch(0o600)
            self._lock = locked_file(folder / "lock")
        except BlockingIOError:
            raise UsageError(f"{folder}: another master runs with this folder; stop it, or take another") from None
        except OSError as error:
            raise UsageError(f"{folder / 'lock'}: cannot be written: {error.strerror}; choose another folder") from None
        try:
            self.credentials = Credentials.kept_in(folder / "credentials.json")
            """Who this master is."""
            write_atomically(token_file(folder), self.credentials.token.text + "\n", private=True)
        except UsageError:
            self.close()
            raise

    def close(self) -> None:
        """Leave the folder to others; once more does nothing."""
        self._lock.close()

    def check(self, config: MasterConfig) -> None:
        """Check what is kept without changing it.

        Raises:
            UsageError: the layout or the state is damaged, or of another model or other data.
        """
        self.load_layout(config)
        self.load_state(config)

    def load_layout(self, config: MasterConfig) -> ShardLayout | None:
        """Return the layout; None if no cluster has described the model yet.

        Raises:
            UsageError: it is damaged, or of other shards than these, or they hold too few layers for the fragments.
        """
        path = self._folder / "layout.json"
        layout = _read(path, ShardLayout)
        if layout is not None and layout.shards != config.shards:
            raise UsageError(
                f"{path}: the model is divided over {', '.join(layout.shards)}, not over {', '.join(config.shards)}; "
                "start the master with those shards, or begin with another folder"
            )
        try:
            fragment_layouts(layout, config.settings.fragments) if layout is not None else ()
        except ValueError as error:
            raise UsageError(f"{path}: {error}, or begin with another folder") from None
        return layout

    def load_state(self, config: MasterConfig) -> FragmentedState:
        """Return the state; that of a master that begins, if there is none. Passes over the data are as told now.

        Raises:
            UsageError: it is damaged, or of other data, more passes or another number of fragments than these.
        """
        path = self._folder / "state.json"
        begun, state = config.first_state(), _read(path, FragmentedState)
        if state is None:
            return begun
        found, told = len(state.fragments), len(begun.fragments)
        if found != told:
            raise UsageError(
                f"{path}: is of a model in {found} fragments, not in {told}; write `fragments: {found}` under "
                "`settings`, or begin with another folder, also for the shards"
            )
        both = (state.leading.chunks, begun.leading.chunks)
        kept, wanted = (f"{one.samples if one else 0} samples in {one.chunks if one else 0} chunks" for one in both)
        if kept != wanted:
            raise UsageError(
                f"{path}: is of data of {kept}, not of {wanted}; start the master with the former, or begin with "
                "another folder"
            )
        try:
            return state.with_passes(config.passes)
        except ValueError as error:
            raise UsageError(f"{path}: {error}; write as many under `data`, or begin with another folder") from None

    def save(self, kept: ShardLayout | FragmentedState) -> None:
        """Keep the layout, or the state.

        Raises:
            StateNotKept: it cannot be written.
        """
        name = "layout.json" if isinstance(kept, ShardLayout) else "state.json"
        try:
            write_atomically(self._folder / name, render_json(to_json(kept)) + "\n", private=True)
        except UsageError as error:
            raise StateNotKept(str(error)) from None


def _read(path: Path, kind: type[T]) -> T | None:
    text = read_private(path)
    if text is None:
        return None
    plain = parse_json(text, str(path), error=UsageError, remedy=_REMEDY)
    try:
        return from_json(kind, plain, str(path), error=UsageError)
    except UsageError as error:
        raise UsageError(f"{error}\n  {_OLD}") from None
