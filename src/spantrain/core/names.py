"""What sites, hosts and devices may be called, the names of files about them, and names in messages."""

import difflib
import re
from collections.abc import Collection, Sequence
from urllib.parse import quote

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_FEW = 3
_MEMBER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,63}")


def is_name(text: str) -> bool:
    """Whether a site, host, device, cluster or shard may be called this: one part of a path, of an address, of a
    certificate.

    >>> is_name("lab-0"), is_name("../escaped"), is_name("")
    (True, False, False)
    """
    return _NAME.fullmatch(text) is not None


def is_member_name(text: str) -> bool:
    """Whether a program may join under this, and have it in its certificate: a name, or one with more behind it.

    >>> is_member_name("lab-0"), is_member_name("lab/0"), is_member_name("/lab")
    (True, True, False)
    """
    return _MEMBER.fullmatch(text) is not None


def check_name(what: str, name: str) -> None:
    """Refuse a name that is none; `what` it is for, if anything, begins the message.

    Raises:
        ValueError: it is empty, longer than 63, or has other characters.
    """
    if not is_name(name):
        shown = repr(name if len(name) <= 80 else f"{name[:80]}...")
        raise ValueError(
            f"{what} {shown}".lstrip()
            + " is no name; use up to 63 letters, digits, '-', '_' or '.', a letter or digit first"
        )


def file_stem(name: str) -> str:
    """Return what a file about something of this name is called: never a path; another name gives another stem.

    Members of a run may have names with a slash, such as `lab/0`.

    >>> file_stem("lab-0"), file_stem("lab/0"), file_stem("../escaped")
    ('lab-0', 'lab%2F0', '%2E.%2Fescaped')
    """
    stem = quote(name, safe="")
    return f"%2E{stem[1:]}" if stem.startswith(".") else stem


def unknown_name(what: str, name: object, known: Collection[str]) -> str:
    """Say that a name is none of those that there are, and which one it is near to.

    >>> unknown_name("colour", "gren", ("green", "red"))
    "colour must be one of green, red, got 'gren': did you mean green?"
    """
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f"{what} must be one of {', '.join(known)}, got {name!r}" + (f": did you mean {near[0]}?" if near else "")


def few(names: Sequence[str]) -> str:
    """Return names with commas; of many the first, and how many more.

    >>> few(("a", "b", "c", "d"))
    'a and 3 more'
    """
    return ", ".join(names) if len(names) <= _FEW else f"{names[0]} and {len(names) - 1} more"
