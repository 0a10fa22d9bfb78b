"""A user's code, packed so that equal code gives equal bytes: machines keep it by its digest, and get it once."""

import gzip
import hashlib
import io
import os
import tarfile
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from spantrain.core.records import Record
from spantrain.errors import ConfigError
from spantrain.reach.programs.keeper import MAX_CODE_BYTES

_LEFT_OUT = ("__pycache__", "node_modules", "*.egg-info", ".*")
"""Folders and files that are no code: what begins with a dot is a repository, an environment, a cache."""


class PackedCode(Record):
    """Files of a folder or a wheel, as a compressed archive."""

    root: Path
    """What was packed."""
    digest: str
    packed: bytes

    @classmethod
    def of(cls, path: Path) -> "PackedCode":
        """Pack a folder or a wheel.

        Raises:
            ConfigError: it is neither, cannot be read, or is larger than code is.
        """
        if not path.is_dir() and path.suffix != ".whl":
            raise ConfigError(f"--code {path}: is no folder and no wheel; give one of them")
        raw = io.BytesIO()
        try:
            with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
                for name, content in _files(path):
                    entry = tarfile.TarInfo(name)
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
                    if raw.tell() > 4 * MAX_CODE_BYTES:
                        raise _too_large(path, name)
        except (OSError, zipfile.BadZipFile) as error:
            raise ConfigError(f"--code {path}: cannot be read: {error}; give a folder or a wheel") from None
        packed = gzip.compress(raw.getvalue(), mtime=0)
        if len(packed) > MAX_CODE_BYTES:
            raise _too_large(path, "all of it")
        return cls(root=path.resolve(), digest=hashlib.sha256(packed).hexdigest(), packed=packed)

    def inside(self, file: Path) -> str | None:
        """Return a file's path in the code; None if it is not in there.

        A wheel has no paths of this machine.
        """
        found = file.resolve()
        return found.relative_to(self.root).as_posix() if found.is_relative_to(self.root) else None


def _files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents, in the order of the names.

    Raises:
        ConfigError: one is larger than code is.
    """
    if path.is_dir():
        for file in sorted(_found(path)):
            if (path / file).stat().st_size > 4 * MAX_CODE_BYTES:
                raise _too_large(path, file)
            yield file, (path / file).read_bytes()
        return
    with zipfile.ZipFile(path) as wheel:
        for name in sorted(wheel.namelist()):
            if not name.endswith("/"):
                yield name, wheel.read(name)


def _found(root: Path) -> Iterator[str]:
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if not _is_left_out(name)]
        for name in files:
            if not _is_left_out(name) and (Path(folder) / name).is_file():
                yield (Path(folder) / name).relative_to(root).as_posix()


def _is_left_out(name: str) -> bool:
    return any(fnmatch(name, wild) for wild in _LEFT_OUT)


def _too_large(path: Path, name: str) -> ConfigError:
    return ConfigError(
        f"--code {path}: with {name} it is more than the {MAX_CODE_BYTES >> 20} MiB that code may be; data are not "
        "copied: keep them in another folder, and have them on each machine"
    )
