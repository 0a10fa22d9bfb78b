"""All that is wrong with one file, collected and told in one message, with near matches for misspelt words."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

from spantrain.errors import ConfigError, SpanTrainError

_SHOWN = 100
_MAX_CHARACTERS = 1000
"""Characters of one problem."""
_MAX_WORD = 60
"""Characters of a value that is shown, and of a word that others like it are looked for."""


@dataclass
class Problems:
    """What is wrong with one file; told by line where lines are known, else in the order in which it was found."""

    source: str
    """The file's name, as the user gave it."""
    entries: list[tuple[int, str]] = field(default_factory=list)
    """Line of the file (0 where lines are not known) and what is wrong there."""
    wire: bool = False
    """Whether it is a message of another machine, and no file."""

    def add(self, path: str, text: str, *, line: int | None = None) -> None:
        """Note one problem of the field at `path`, on a line of the file if that is known."""
        where = ", ".join(part for part in (f"line {line}" if line else "", shortened(path, 200)) if part)
        self.entries.append((line or 0, shortened(f"{where}: {text}" if where else text, _MAX_CHARACTERS)))

    def unknown(self, what: str, word: str, known: Iterable[str]) -> str:
        """Return what to say of a word that is not known, with the words like it unless too much is wrong already."""
        hint = f"; {did_you_mean(word, known)}" if len(self.entries) < _SHOWN else ""
        return f"unknown {what} {shortened(word)!r}{hint}"

    def check(self, error: type[SpanTrainError] = ConfigError) -> None:
        """Raise one error that tells every problem; do nothing if there are none."""
        if not self.entries:
            return
        told = [text for _, text in sorted(self.entries, key=lambda entry: entry[0])]
        if len(told) == 1:
            raise error(f"{self.source}: {told[0]}")
        head = f"{self.source}: {len(told)} problems"
        if len(told) > _SHOWN:
            told = [*told[:_SHOWN], f"... and {len(told) - _SHOWN} more"]
        raise error("\n  ".join([head, *told]))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the words most like this one as the end of a sentence; all of them if none is like it.

    >>> did_you_mean("RTX4090", ["rtx-4090", "t4"]), did_you_mean("bandwith", ["bandwidth", "latency"])
    ("did you mean 'rtx-4090'?", "did you mean 'bandwidth'?")
    >>> did_you_mean("colour", ["name", "hosts"])
    'known: name, hosts'
    """
    words = list(known)
    plain = {_plain(candidate): candidate for candidate in words}
    given = _plain(word[:_MAX_WORD])
    near = [given] if given in plain else difflib.get_close_matches(given, plain, n=2, cutoff=0.7)
    if not near and len(given) >= 3:
        near = [candidate for candidate in plain if given in candidate][:2]
    if near:
        return f"did you mean {' or '.join(repr(plain[match]) for match in near)}?"
    return f"known: {', '.join(words[:_SHOWN])}" if words else "none is known"


def shortened(text: str, most: int = _MAX_WORD) -> str:
    """Return a text, or its beginning where it is too long to be shown.

    >>> shortened("abcdefgh", 6)
    'abc...'
    """
    return text if len(text) <= most else f"{text[: most - 3]}..."


def below(path: str, name: str) -> str:
    """Return the path of a field of this name in what stands at a path."""
    return f"{path}.{name}" if path else name


def _plain(word: str) -> str:
    return "".join(letter for letter in word.lower() if letter.isalnum())
