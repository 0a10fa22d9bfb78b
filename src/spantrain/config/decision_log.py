"""decisions.jsonl: what each device's policy heard and answered, one line each. See docs/artefacts.md.

The first line names format and version. A line with `device` begins that device's part, the lines behind it are its
decisions in order.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from spantrain.config.files.json_codec import from_json, to_json
from spantrain.config.files.parsing import parse_json
from spantrain.config.files.problems import shortened
from spantrain.config.files.text_files import read_text, write_atomically
from spantrain.core.messages import Decision, DeviceDecisions
from spantrain.errors import ConfigError

DECISIONS_FORMAT = "spantrain-decisions"
_VERSION = 2
_REMEDY = "train again: `spantrain train` writes it"


def write_decisions(logs: Iterable[DeviceDecisions], path: Path) -> None:
    """Write the decisions of a run's devices.

    Raises:
        ConfigError: it cannot be written there.
    """
    lines: list[dict[str, Any]] = [{"format": DECISIONS_FORMAT, "version": _VERSION}]
    for log in logs:
        head = to_json(log)
        lines += [{key: head[key] for key in head if key != "decisions"}, *head["decisions"]]
    write_atomically(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def read_decisions(path: Path) -> tuple[DeviceDecisions, ...]:
    """Read what `write_decisions` wrote.

    Raises:
        ConfigError: it is missing, something else, of another version, or a line is wrong; the line is named.
    """
    text = read_text(path, remedy=_REMEDY)
    if not text.endswith("\n"):
        raise ConfigError(f"{path}: its last line is cut off; {_REMEDY}")
    rows = [(f"{path}, line {n}", line) for n, line in enumerate(text.split("\n")[:-1], start=1)]
    _check_head(path, rows)
    parts: list[tuple[str, dict[str, Any], list[Decision]]] = []
    for where, line in rows[1:]:
        data = _object(where, line)
        if "device" in data:
            parts.append((where, data, []))
        elif not parts:
            raise ConfigError(f"{where}: a decision stands before any line with a device; {_REMEDY}")
        else:
            parts[-1][2].append(from_json(Decision, data, where))
    return tuple(_device(where, head, decisions, path) for where, head, decisions in parts)


def _check_head(path: Path, rows: list[tuple[str, str]]) -> None:
    head = _object(*rows[0]) if rows else {}
    if head.get("format") != DECISIONS_FORMAT:
        raise ConfigError(f"{path}: is not a {DECISIONS_FORMAT} file; {_REMEDY}")
    if head != {"format": DECISIONS_FORMAT, "version": _VERSION}:
        got = shortened(repr(head.get("version")))
        raise ConfigError(f"{path}, line 1: has format version {got}, this program reads {_VERSION}; {_REMEDY}")


def _object(where: str, line: str) -> dict[str, Any]:
    data = parse_json(line, where, is_line=True)
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: must be an object; {_REMEDY}")
    return data


def _device(where: str, head: dict[str, Any], decisions: list[Decision], path: Path) -> DeviceDecisions:
    log = replace(from_json(DeviceDecisions, {**head, "decisions": []}, where), decisions=tuple(decisions))
    for before, after in pairwise(log.decisions):
        if after.now_s < before.now_s or after.step < before.step:
            raise ConfigError(
                f"{path}: {log.device}: time runs backwards, from step {before.step}, now_s {before.now_s:.6f} "
                f"({before.event}) to step {after.step}, now_s {after.now_s:.6f} ({after.event}); {_REMEDY}"
            )
    return log
