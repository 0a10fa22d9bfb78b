"""A master in a process of its own, which is killed: `python master_process.py ADDRESS FOLDER`, and who starts it."""

import subprocess
import sys
import threading
from pathlib import Path

from spantrain.outer.master.server import MasterServer
from testing.outer.masters import CONFIG
from testing.patience import PATIENCE_S


class MortalMaster:
    """Started again and again, at one address, with one folder; ended with the `with`."""

    def __init__(self, address: str, folder: Path) -> None:
        self._words = [sys.executable, __file__, address, str(folder)]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> str:
        """Start it; return its token when it can be joined."""
        assert self._process is None
        self._process = subprocess.Popen(self._words, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.wait(PATIENCE_S)
            assert process.stdout
            process.stdout.close()

    def __enter__(self) -> "MortalMaster":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def main() -> None:
    address, folder = sys.argv[1:]
    master = MasterServer(bind=address, state_dir=Path(folder), config=CONFIG)
    master.start()
    print(master.token, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
