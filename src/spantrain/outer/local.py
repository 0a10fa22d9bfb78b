"""Master and shards of an outer optimizer in a process of their user's."""

import tempfile
from contextlib import ExitStack
from pathlib import Path

from spantrain.outer.link.status import MasterStatus
from spantrain.outer.master.config import MasterConfig
from spantrain.outer.master.server import MasterServer
from spantrain.outer.shard.server import ShardServer, master_link
from spantrain.outer.shard.snapshots import FolderSnapshots


class LocalParameterServer:
    """A master and its shards: for examples, tests, and clusters that share one machine.

    They run while it is open, in threads, and are reached from this machine only.

    with LocalParameterServer(MasterConfig(shards=("s0", "s1"))) as server:
        ... OuterOptimizer(..., master=server.address, token=server.token, cluster="a")
    """

    def __init__(self, config: MasterConfig | None = None, *, folder: Path | None = None) -> None:
        """Open nothing yet; `folder`: for state and snapshots, from which to go on; None for one that is removed."""
        self._config = config or MasterConfig(shards=("s0",))
        self._folder = folder
        self._open = ExitStack()
        self._master: MasterServer | None = None

    def __enter__(self) -> "LocalParameterServer":
        with ExitStack() as stack:
            folder = self._folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spantrain-outer-")))
            self._master = stack.enter_context(
                MasterServer(bind="127.0.0.1:0", state_dir=folder / "master", config=self._config)
            )
            for name in self._config.shards:
                shard = ShardServer(
                    name=name,
                    bind="tcp://127.0.0.1:0",
                    snapshots=FolderSnapshots(folder / name),
                    link_of=master_link(address=self.address, token=self.token, name=name),
                    encrypted=self._config.encrypted,
                )
                stack.enter_context(shard)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def _running(self) -> MasterServer:
        assert self._master, "open it first, with `with`"
        return self._master

    @property
    def address(self) -> str:
        """Where clusters join: HOST:PORT."""
        return self._running.address

    @property
    def token(self) -> str:
        """What they join with."""
        return self._running.token

    def status(self) -> MasterStatus:
        """Return what the master knows."""
        return self._running.status()
