"""Master and shards of an outer.yaml on this machine, kept up until told to stop."""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spantrain.app.outer.health import ASK_EVERY_S, MASTER, Asker, Health
from spantrain.app.outer.setup import master_config, naming_state
from spantrain.app.outer.supervisor import OuterHousehold
from spantrain.app.outer.where import address_file, token_file
from spantrain.config.outer.outer_file import OuterConfig
from spantrain.errors import UsageError
from spantrain.outer.master.files import MasterFiles
from spantrain.transport.control.address import Address
from spantrain.transport.control.private_file import make_private_folder

_LOOK_EVERY_S = 0.1
_PATIENCE = 6
"""Times the silence after which a member is lost, for which a process may do nothing."""
_LEAST_PATIENCE_S = 60.0
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, kw_only=True)
class OuterUp:
    """A master that can be joined."""

    address: str
    token: str
    token_file: Path
    logs: Path


def keep_up(
    config: OuterConfig,
    config_path: Path,
    stop: threading.Event,
    *,
    ready: Callable[[OuterUp], None],
    note: Callable[[str], None],
    patience_s: float | None = None,
) -> None:
    """Run them, start again what ends or does not work, until told to stop.

    `ready` hears once that the master can be joined. `patience_s`: for how long one may do nothing.

    Raises:
        UsageError: the master's folder cannot be used, or one of them does not take what the file says.
    """
    logs, written = config.master.state / "logs", address_file(config.master)
    _prepare(config, logs, written)
    commands: dict[str, tuple[str, ...]] = {MASTER: ("outer", "master", str(config_path), "--end-with-input")}
    commands |= {
        shard.name: ("outer", "shard", str(config_path), shard.name, "--end-with-input") for shard in config.shards
    }
    asker = Asker(lambda: _reach(config, written), every_s=ASK_EVERY_S if patience_s is None else patience_s / 8)
    health = Health([shard.name for shard in config.shards], patience_s=patience_s or _patience_s(config))
    told = False
    with OuterHousehold(commands, logs, note, may_start=lambda name: name == MASTER or written.exists()) as household:
        while not stop.is_set():
            household.look(time.monotonic())
            asker.tell(health)
            for name, reason in health.sick(time.monotonic(), household.started_s):
                household.end(name, reason, time.monotonic())
            if not told and written.exists():
                told = True
                token = token_file(config.master)
                ready(OuterUp(address=written.read_text().strip(), token=token.read_text().strip(),
                              token_file=token, logs=logs))  # fmt: skip
            stop.wait(_LOOK_EVERY_S)


def _patience_s(config: OuterConfig) -> float:
    return max(_LEAST_PATIENCE_S, _PATIENCE * master_config(config).settings.lost_after_s)


def _reach(config: OuterConfig, written: Path) -> tuple[str, str] | None:
    """Return how the master is asked from this machine; None before it is there."""
    try:
        port = Address.parse(written.read_text().strip()).port
        token = token_file(config.master).read_text().strip()
    except OSError:
        return None
    listen = config.master.listen
    return str(Address(host=_ANYWHERE.get(listen, listen), port=port)), token


def _prepare(config: OuterConfig, logs: Path, written: Path) -> None:
    """Check the master's folder before anything runs, and take out the address of a master that has ended.

    Raises:
        ConfigError: it cannot be written, is in use, or what is kept in it is damaged, or of another model or data.
    """
    with naming_state(config), contextlib.closing(MasterFiles(config.master.state)) as files:
        files.check(master_config(config))
        make_private_folder(logs)
        try:
            written.unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(f"{written}: cannot be removed: {error.strerror}; remove it") from None
