"""Text -> plain values or YAML nodes within bounds: the one parser of JSON and the one of YAML below all readers.

Whatever a text holds, it is answered within seconds and a few hundred megabytes: with a value, or with one refusal.
"""

import json
import re
from collections import Counter
from typing import Any

import yaml

from spantrain.errors import ConfigError, UsageError

_MAX_VALUES = 4_000_000
"""Values in a JSON text; a profile of 500 devices has half as many."""
_MAX_YAML_CHARACTERS = 2**20
_MAX_NODES = 50_000
"""Nodes in a YAML text, an alias counted as what it stands for; 5,000 hosts have so many."""
_MAX_DEPTH = 50
_MAX_INTEGER, _MAX_INTEGER_DIGITS = 2**63, 19
_SMALLEST, _LARGEST = 1e-60, 1e40
"""Sizes of numbers: float32 has fewer, and a product of a few of these is still one."""
_ESCAPED = re.compile(r"\\u(?:[dD][89a-fA-F]|0000)")
_NO_TEXT = re.compile("[\0\ud800-\udfff]")


class OutOfRange(float):
    """In the place of a number that nothing here can be: not finite, so that every reader of numbers refuses it."""

    written: str
    """As it stands in the text."""

    def __new__(cls, written: str) -> "OutOfRange":
        """Make one of a number's text."""
        made = super().__new__(cls, "inf")
        made.written = written
        return made


def parse_json(
    text: str,
    source: str,
    *,
    error: type[UsageError] = ConfigError,
    remedy: str = "make the file anew",
    constants: bool = False,
    is_line: bool = False,
) -> Any:
    """Return the value of a JSON text; a key given twice and text that no file or screen can show are refused.

    Whole numbers from 2^63 on and others above 1e40 or below 1e-60, all but zero, become `OutOfRange`.

    Args:
        text: the text.
        source: its name in errors.
        error: what to raise.
        remedy: what to do, the end of the message.
        constants: whether NaN and Infinity may stand for numbers, as some programs of others write them.
        is_line: whether it is one line of a file, which `source` names.

    Raises:
        UsageError: (the class given as `error`) the text is no such JSON, or has too much in it.
    """
    if text.count(",") + text.count("[") + text.count("{") > _MAX_VALUES:
        raise error(f"{source}: holds more than {_MAX_VALUES} values; {remedy}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            raise error(f"{source}: keys given twice in one object: {_twice(pairs)}; keep one of each")
        return table

    def constant(number: str) -> float:
        if constants:
            return float(number)
        raise error(f"{source}: holds {number}, which is no JSON number; {remedy}")

    try:
        value = json.loads(
            text, object_pairs_hook=unique, parse_constant=constant, parse_int=_integer, parse_float=_number
        )
    except json.JSONDecodeError as reason:
        where = source if is_line else f"{source}, line {reason.lineno}"
        raise error(f"{where}: is not valid JSON: {reason.msg}; {remedy}") from None
    except RecursionError:
        raise error(f"{source}: is nested too deeply; {remedy}") from None
    if _ESCAPED.search(text) and (found := _unshowable(value)):
        raise error(f"{source}: holds {found}, which is no text; {remedy}")
    return value


def _twice(pairs: list[tuple[str, Any]]) -> str:
    twice = sorted(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
    return ", ".join(key[:60] for key in twice[:5]) + (f" and {len(twice) - 5} more" if len(twice) > 5 else "")


def _integer(text: str) -> int | float:
    if len(text.lstrip("-")) <= _MAX_INTEGER_DIGITS and abs(value := int(text)) < _MAX_INTEGER:
        return value
    return OutOfRange(text)


def _number(text: str) -> float:
    value = float(text)
    return value if is_in_range(value) else OutOfRange(text)


def is_in_range(value: float) -> bool:
    """Whether a number of a file is of a size that is reckoned with; NaN is not.

    >>> is_in_range(0.0), is_in_range(-2.5), is_in_range(1e300), is_in_range(1e-300)
    (True, True, False, False)
    """
    return value == 0 or _SMALLEST <= abs(value) <= _LARGEST


def _unshowable(value: object) -> str:
    """Return, in ASCII, a character among all texts that is no character; empty if there is none."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case dict() as table:
                waiting += [*table.keys(), *table.values()]
            case list() as values:
                waiting += values
            case str() as text if found := _NO_TEXT.search(text):
                return ascii(found[0])
    return ""


def parse_yaml_nodes(text: str, source: str) -> yaml.Node | None:
    """Return the root of a YAML text of one document, every scalar of it as text; None if there is nothing in it.

    Raises:
        ConfigError: the text is no YAML, or has several documents or too much in it.
    """
    if len(text) > _MAX_YAML_CHARACTERS:
        raise ConfigError(f"{source}: has more than {_MAX_YAML_CHARACTERS} characters; leave out what is not needed")
    try:
        # compose makes nodes, never objects; the base loader takes every scalar as text.
        return yaml.compose(text, Loader=_BoundedLoader)
    except _TooMuch as reason:
        raise ConfigError(f"{source}, line {reason.line}: {reason}") from None
    except yaml.MarkedYAMLError as reason:
        mark = reason.problem_mark or reason.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{source}{line}: is not valid YAML: {reason.problem or reason.context}") from None
    except yaml.YAMLError as reason:
        raise ConfigError(f"{source}: is not valid YAML: {str(reason).splitlines()[0]}") from None


class _TooMuch(Exception):
    """A text holds more than is read."""

    def __init__(self, text: str, line: int) -> None:
        super().__init__(text)
        self.line = line


class _BoundedLoader(yaml.BaseLoader):
    """Stops when nodes are too many or too deep; a node that is named again counts with all that is in it.

    Written in Python on purpose: libyaml's loader ends the process on a text that is nested deeply.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = 0
        self._depth = 0
        self._sizes: dict[int, int] = {}
        """Nodes in each, by identity, when it is complete."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        line = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
        before = self._nodes
        again = self.check_event(yaml.AliasEvent)
        self._nodes, self._depth = self._nodes + 1, self._depth + 1
        if self._depth > _MAX_DEPTH:
            raise _TooMuch(f"is nested more than {_MAX_DEPTH} deep; write it flatter", line)
        node = super().compose_node(parent, index)
        if again and id(node) not in self._sizes:
            raise _TooMuch("an alias stands inside of what it names; write out what is meant", line)
        if again:
            self._nodes += self._sizes[id(node)]
        if self._nodes > _MAX_NODES:
            raise _TooMuch(f"holds more than {_MAX_NODES} values, aliases counted as what they stand for", line)
        self._sizes.setdefault(id(node), self._nodes - before)
        self._depth -= 1
        return node
