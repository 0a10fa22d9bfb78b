"""Pictures of classes: a folder for each class, or a data set that the `datasets` library saved."""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spantrain.errors import ConfigError
from spantrain.models.data.choice import IMAGE_SUFFIXES
from spantrain.models.data.records import apart, load_saved_dataset

_HELD_OUT_EVERY = 6
_IMAGE_FIELDS = ("image", "img", "pixel_values")
_LABEL_FIELDS = ("label", "labels", "fine_label")
_MIDDLE = 127.5


class Images:
    """Pictures brought to the model's size, colours from -1 to 1; each is read when it is asked for."""

    def __init__(self, source: "_Folder | _Saved", indices: Sequence[int], shape: tuple[int, int, int]) -> None:
        self._source = source
        self._indices = indices
        self._channels, self._height, self._width = shape
        self.digest = sha256(f"{source.digest}{list(indices)}".encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._indices)

    def inputs(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return float32 `(samples, channels, height, width)`."""
        return (torch.stack([self._pixels(self._indices[index]) for index in indices]),)

    def labels(self, indices: Sequence[int]) -> Tensor:
        """Return int64 `(samples,)`."""
        return torch.tensor([self._source.labels[self._indices[index]] for index in indices], dtype=torch.int64)

    def _pixels(self, index: int) -> Tensor:
        picture = self._source.picture(index).convert("L" if self._channels == 1 else "RGB")
        pixels = np.asarray(picture.resize((self._width, self._height)), dtype=np.float32) / _MIDDLE - 1.0
        return torch.from_numpy(pixels.reshape(self._height, self._width, self._channels)).permute(2, 0, 1)


def open_images(dataset: str, *, shape: tuple[int, ...], classes: int | None, held_out: bool) -> Images:
    """Open `images:FOLDER` or `hf:FOLDER`; every sixth picture is held out.

    Args:
        dataset: as `ModelSpec.dataset`.
        shape: of the model's input for one sample: channels, height, width.
        classes: how many the model tells apart; None: not known.
        held_out: the part that is held out, instead of the one to train on.

    Raises:
        ConfigError: pillow is missing, the folder has no pictures of classes, or more classes than the model.
    """
    kind, _, place = dataset.partition(":")
    if len(shape) != 3:
        raise ConfigError(f"data {place}: the model reads samples of shape {shape}, not pictures")
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"data {dataset}: reading pictures needs pillow; run: pip install pillow") from error
    path = Path(place)
    parts: Sequence[_Folder | _Saved] = (
        [_Folder(path)] if kind == "images" else [_Saved(rows, path) for rows in load_saved_dataset(path)]
    )
    for source in parts:
        if classes is not None and source.class_count > classes:
            raise ConfigError(
                f"data {place}: has {source.class_count} classes, but the model tells {classes} apart; give fewer, or "
                "a model with more"
            )
    if len(parts) > 1:
        return Images(parts[held_out], range(len(parts[held_out].labels)), shape)
    chosen = apart(range(len(parts[0].labels)), _HELD_OUT_EVERY)[held_out]
    if not chosen:
        raise ConfigError(f"data {place}: has too few pictures to hold any out; give at least {_HELD_OUT_EVERY}")
    return Images(parts[0], chosen, shape)


class _Folder:
    """A folder of folders, one for each class, in the order of their names."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ConfigError(f"data {folder}: does not exist on this machine; give a folder of one folder per class")
        names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        inside = ((path, number) for number, name in enumerate(names) for path in sorted((folder / name).rglob("*")))
        found = [entry for entry in inside if entry[0].suffix.lower() in IMAGE_SUFFIXES and entry[0].is_file()]
        if not found:
            raise ConfigError(
                f"data {folder}: no pictures; wanted a folder per class with {', '.join(sorted(IMAGE_SUFFIXES))} in it"
            )
        # Classes take turns, so that every sixth picture is of each class.
        found.sort(key=lambda entry: sha256(entry[0].relative_to(folder).as_posix().encode()).digest())
        self.class_count = len(names)
        self.labels = [number for _, number in found]
        self._paths = [path for path, _ in found]
        digest = sha256()
        for path, number in found:
            _read_picture(path, whole=False)
            digest.update(f"{path.relative_to(folder).as_posix()}:{number}:".encode() + path.read_bytes())
        self.digest = digest.hexdigest()

    def picture(self, index: int) -> Any:
        """Read a picture.

        Raises:
            ConfigError: the file is damaged.
        """
        return _read_picture(self._paths[index], whole=True)


def _read_picture(path: Path, *, whole: bool) -> Any:
    """Read a picture, or no more of it than shows that it is one."""
    from PIL import Image

    try:
        with Image.open(path) as picture:
            return picture.copy() if whole else picture.verify()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # pillow's, of damaged files
        raise ConfigError(
            f"data {path}: not a picture that pillow reads ({error}); remove it, or save it again"
        ) from error


class _Saved:
    """Rows of a data set with a picture and its class."""

    def __init__(self, rows: Any, path: Path) -> None:
        columns = rows.column_names
        image = next((name for name in _IMAGE_FIELDS if name in columns), None)
        label = next((name for name in _LABEL_FIELDS if name in columns), None)
        if image is None or label is None:
            raise ConfigError(
                f"data {path}: has {', '.join(columns)}; wanted a picture ({', '.join(_IMAGE_FIELDS)}) and its class "
                f"({', '.join(_LABEL_FIELDS)})"
            )
        self._rows, self._image = rows, image
        self.labels = [int(value) for value in rows[label]]
        self.class_count = max(self.labels, default=0) + 1
        self.digest = sha256(f"{rows._fingerprint}{self.labels}".encode()).hexdigest()

    def picture(self, index: int) -> Any:
        """Read a picture."""
        return self._rows[index][self._image]
