"""Read YAML strictly, one node at a time, going on after an error so that all of them are found.

Every scalar is taken as text and read by what its field needs. So YAML's own guesses (`no` is false, `1e-4` is
text, `1:30` is ninety, `010` is eight) never touch a value, and each problem can name its line. A field that
cannot be read notes a problem and returns a harmless value in its place; the caller must end with
`Problems.check`, before anything that was read is used.
"""

import math
import re
from collections.abc import Callable, Collection

import yaml

from spantrain.config.files.parsing import is_in_range, parse_yaml_nodes
from spantrain.config.files.problems import Problems, below, shortened
from spantrain.core.names import check_name
from spantrain.core.records import Record
from spantrain.errors import ConfigError

_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_MAX_DIGITS = 18
_KNOWN_TAGS = frozenset(f"tag:yaml.org,2002:{name}" for name in ("str", "seq", "map"))


class Field(Record):
    """One node of a YAML file, and the path that leads to it."""

    node: yaml.Node
    path: str
    problems: Problems
    line: int
    """On which its key, or its list entry, stands in the file; from 1."""

    def problem(self, text: str) -> None:
        """Note a problem of this field."""
        self.problems.add(self.path, text, line=self.line)

    @property
    def is_table(self) -> bool:
        """Whether it holds `key: value` lines."""
        return isinstance(self.node, yaml.MappingNode)

    @property
    def is_list(self) -> bool:
        """Whether it holds a list."""
        return isinstance(self.node, yaml.SequenceNode)

    @property
    def is_list_or_empty(self) -> bool:
        """Whether it holds a list, or nothing at all."""
        return self.is_list or self._is_empty

    @property
    def _is_empty(self) -> bool:
        return isinstance(self.node, yaml.ScalarNode) and not self.node.value

    def entries(self) -> dict[str, "Field"]:
        """Return all `key: value` pairs, whatever the keys; an empty field has none."""
        if not isinstance(self.node, yaml.MappingNode):
            if not self._is_empty:
                self._wanted("`key: value` lines")
            return {}
        self._check_tag()
        found: dict[str, Field] = {}
        for key_node, value_node in self.node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.add(self.path, "a key must be one word", line=line)
                continue
            key = key_node.value
            if key in found:
                self.problems.add(below(self.path, key), "is given twice; keep one", line=line)
                continue
            found[key] = Field(node=value_node, path=below(self.path, key), problems=self.problems, line=line)
        return found

    def table(self, *, required: Collection[str], optional: Collection[str] = ()) -> dict[str, "Field"]:
        """Return the pairs of a table with known keys; unknown and missing ones are problems."""
        known = [*required, *optional]
        if self._is_empty:
            self._wanted(f"a table with {', '.join(required)}")
            return {}
        found = self.entries()
        for key, value in found.items():
            if key not in known:
                value.problem(self.problems.unknown("key", key, [k for k in known if k not in found] or known))
        missing = [key for key in required if key not in found]
        if missing and self.is_table:
            self.problem(f"needs {', '.join(missing)}")
        return {key: value for key, value in found.items() if key in known}

    def items(self) -> list["Field"]:
        """Return the entries of a list; an empty field has none."""
        if not isinstance(self.node, yaml.SequenceNode):
            if not self._is_empty:
                self._wanted("a list (lines that start with '- ')")
            return []
        self._check_tag()
        return [
            Field(node=node, path=f"{self.path}[{index}]", problems=self.problems, line=node.start_mark.line + 1)
            for index, node in enumerate(self.node.value)
        ]

    def text(self) -> str | None:
        """Return the text of a scalar as it is written; None, and a problem, if it is empty or no scalar."""
        if not isinstance(self.node, yaml.ScalarNode) or not self.node.value.strip():
            self._wanted("text")
            return None
        self._check_tag()
        return str(self.node.value).strip()

    def name(self) -> str:
        """Return a name that may stand in a file name; empty if it is not one."""
        text = self.text()
        if text is None:
            return ""
        try:
            check_name("", text)
        except ValueError as reason:
            self.problem(str(reason))
            return ""
        return text

    def quantity(self, parse: Callable[[str], float], *, zero_allowed: bool = False) -> float:
        """Return a quantity with a unit, in SI, read by one of core.quantities; 1 if it cannot be read."""
        text = self.text()
        if text is None:
            return 1.0
        try:
            value = parse(text)
        except (ValueError, OverflowError) as reason:
            if text.startswith("-") and not zero_allowed:
                self.problem(f"{shortened(text)!r} is negative; it must be more than zero")
            else:
                self.problem(str(reason))
            return 1.0
        if not is_in_range(value) or (value <= 0 and not zero_allowed):
            self.problem(f"{shortened(text)!r} must be {'a usual size' if value > 0 else 'more than zero'}")
            return 1.0
        return value

    def number(self) -> float | None:
        """Return a number without a unit; None, and a problem, if it is none."""
        text = self.text()
        if text is None:
            return None
        value = float(text) if _NUMBER.fullmatch(text) else math.nan
        if not is_in_range(value):
            self.problem(f"{shortened(text)!r} is not a number that is read here; write e.g. 0.5 or 1e-4")
            return None
        return value

    def ratio(self) -> float:
        """Return a part of one, written `0.01` or `1 %`; it must be in [0, 1); 0 if it is not."""
        text = self.text()
        if text is None:
            return 0.0
        digits, percent = (text[:-1].rstrip(), 100) if text.endswith("%") else (text, 1)
        value = float(digits) / percent if _NUMBER.fullmatch(digits) else math.nan
        if not 0 <= value < 1:
            self.problem(f"{shortened(text)!r} must be at least 0 and less than 1; write e.g. 0.001 or 0.1 %")
            return 0.0
        return value

    def count(self, *, most: int = 1024) -> int:
        """Return a whole number from 1 to `most`; 1 if it is not."""
        text = self.text()
        if text is None:
            return 1
        value = int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else 0
        if not 1 <= value <= most:
            self.problem(f"{shortened(text)!r} must be a whole number from 1 to {most}")
            return 1
        return value

    def flag(self) -> bool:
        """Return true or false; false if it is neither."""
        text = self.text()
        if text not in (None, "true", "false"):
            self.problem(f"{shortened(text)!r} must be true or false")
        return text == "true"

    def _wanted(self, what: str) -> None:
        """Note that something else stands here."""
        if isinstance(self.node, yaml.MappingNode):
            got = "a table"
        elif isinstance(self.node, yaml.SequenceNode):
            got = "a list"
        else:
            got = repr(shortened(self.node.value)) if self.node.value else "nothing"
        self.problem(f"must be {what}, got {got}")

    def _check_tag(self) -> None:
        if self.node.tag not in _KNOWN_TAGS:
            self.problem(
                f"YAML tags such as {self.node.tag.replace('tag:yaml.org,2002:', '!!')} are not used; remove it"
            )


def parse_yaml(text: str, problems: Problems) -> Field:
    """Return the root of a YAML text.

    Raises:
        ConfigError: the text is no YAML, or holds nothing, too much or several documents.
    """
    node = parse_yaml_nodes(text, problems.source)
    if node is None:
        raise ConfigError(f"{problems.source}: is empty; write into it what its page of the documentation shows")
    return Field(node=node, path="", problems=problems, line=node.start_mark.line + 1)
