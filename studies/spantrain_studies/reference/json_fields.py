"""The strict reader of one value of a foreign JSON file: wanted keys and types, all problems in one message."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spantrain.config.files.parsing import OutOfRange, parse_json
from spantrain.config.files.problems import Problems, shortened
from spantrain.config.files.text_files import read_text
from spantrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class JsonField:
    """One value of a file, with its path; where it is not what is wanted, a problem is noted and a stand-in returned.

    Keys that nobody asks for are left alone: such files carry descriptions, sources and notes.
    """

    value: Any
    path: str
    problems: Problems

    def problem(self, text: str) -> None:
        """Note what is wrong here."""
        self.problems.add(self.path, text)

    def entries(self) -> "dict[str, JsonField]":
        """Return the entries of an object; none, and a problem, if it is something else."""
        if not isinstance(self.value, dict):
            self._wanted("an object")
            return {}
        return {key: self._below(str(key), value) for key, value in self.value.items()}

    def child(self, key: str) -> "JsonField":
        """Return an entry of an object; a field without a value, and a problem, if it is missing."""
        if not isinstance(self.value, dict):
            self._wanted("an object")
        elif key in self.value:
            return self._below(key, self.value[key])
        else:
            self.problem(f"needs {key!r}")
        return JsonField(value=None, path="", problems=Problems(source=self.problems.source))

    def items(self) -> "list[JsonField]":
        """Return the entries of a list."""
        if not isinstance(self.value, list):
            self._wanted("a list")
            return []
        return [
            JsonField(value=value, path=f"{self.path}[{index}]", problems=self.problems)
            for index, value in enumerate(self.value)
        ]

    def text(self) -> str:
        """Return a text that is not empty."""
        if not isinstance(self.value, str) or not self.value:
            self._wanted("text")
            return "?"
        return self.value

    def number(self, *, positive: bool = False) -> float:
        """Return a finite number that is not negative; 1 if it is none."""
        found = self.any_number()
        if found < 0 or (positive and found == 0):
            self._wanted("a number above zero" if positive else "a number, zero or more")
            return 1.0
        return found

    def any_number(self) -> float:
        """Return a finite number; 1 if it is none."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self._wanted("a number")
            return 1.0
        return float(value)

    def count(self, *, least: int = 1, most: int = 2**62) -> int:
        """Return a whole number from `least` to `most`."""
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not least <= self.value <= most:
            self._wanted(f"a whole number from {least}" + (f" to {most}" if most < 2**62 else " on"))
            return least
        return self.value

    def numbers(self, length: int | None = None) -> tuple[float, ...]:
        """Return a list of numbers that are not negative, of a certain length if one is given."""
        found = tuple(item.number() for item in self.items())
        if length is not None and isinstance(self.value, list) and len(found) != length:
            self.problem(f"must hold {length} numbers, one for each layer, got {len(found)}")
            return (0.0,) * length
        return found

    def _below(self, key: str, value: Any) -> "JsonField":
        return JsonField(value=value, path=f"{self.path}.{key}" if self.path else key, problems=self.problems)

    def _wanted(self, what: str) -> None:
        shown = self.value.written if isinstance(self.value, OutOfRange) else json.dumps(self.value)
        self.problem(f"must be {what}, got {shortened(shown)}")


def parse_file(path: Path, *, remedy: str) -> JsonField:
    """Return the root of a JSON file.

    Raises:
        ConfigError: the file is missing or is no JSON.
    """
    value = parse_json(read_text(path, remedy=remedy), str(path), remedy=remedy)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: must hold a JSON object; {remedy}")
    return JsonField(value=value, path="", problems=Problems(source=str(path)))
