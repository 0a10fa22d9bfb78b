"""What a run logged, read strictly: trace.json, which `schedule.render.perfetto` wrote, and decisions.jsonl.

The first line of decisions.jsonl names format and version. A line with `device` begins that device's part, the lines
behind it are its decisions in order (docs/artefacts.md).
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from spantrain.config.files.json_codec import from_json, read_part, to_json
from spantrain.config.files.parsing import parse_json
from spantrain.config.files.problems import Problems, shortened
from spantrain.config.files.text_files import read_text, write_atomically
from spantrain.core.messages import Decision, DeviceDecisions
from spantrain.core.records import Record
from spantrain.core.trace import TRACE_FORMAT, TRACE_VERSION, Flow, Interval, Trace
from spantrain.errors import ConfigError

_REMEDY = "write one with `spantrain train`"
_AGAIN = "train again with `spantrain train`"


def read_trace(path: Path) -> Trace:
    """Return the trace that a file holds.

    Raises:
        ConfigError: there is no such file, it is none of ours, or events lack fields or have wrong ones.
    """
    root = parse_json(read_text(path, remedy=_REMEDY), str(path), remedy=_REMEDY)
    if not isinstance(root, dict):
        raise ConfigError(f"{path}: must hold a JSON object; {_REMEDY}")
    head = root.get("otherData")
    if not isinstance(head, dict) or head.get("format") != TRACE_FORMAT:
        raise ConfigError(f"{path} is not a trace that SpanTrain wrote: it has no otherData.format {TRACE_FORMAT!r}")
    if head.get("version") != TRACE_VERSION:
        raise ConfigError(f"{path}: trace version {head.get('version')!r}, this program reads version {TRACE_VERSION}")
    if not isinstance(root.get("traceEvents"), list):
        raise ConfigError(f"{path}: needs 'traceEvents', a list; {_AGAIN}")
    return _Events(path, root["traceEvents"]).trace(head.get("clock"))


class _Process(Record):
    pid: int
    name: str


class _Events:
    """Events of a file; what is wrong with them becomes problems, told at the end."""

    def __init__(self, path: Path, events: list[object]) -> None:
        self._problems = Problems(str(path))
        self._by_kind: dict[object, list[tuple[str, dict[str, Any]]]] = {}
        for index, event in enumerate(events):
            if isinstance(event, dict) and isinstance(event.get("ph"), str):
                self._by_kind.setdefault(event["ph"], []).append((f"traceEvents[{index}]", event))
            else:
                self._problems.add(f"traceEvents[{index}]", "must be an object with 'ph', the kind of event")

    def trace(self, clock: object) -> Trace:
        names = [entry for entry in self._of("M") if entry[1].get("name") == "process_name"]
        made = [
            read_part(_Process, {"pid": event.get("pid"), **_args(event)}, at, self._problems) for at, event in names
        ]
        devices = {process.pid: process.name for process in made if process is not None}
        intervals = [self._interval(at, event, devices) for at, event in self._of("X", "i")]
        flows = [self._flow(at, event) for at, event in self._of("s")]
        if not isinstance(clock, str) or not clock:
            self._problems.add("otherData.clock", "must be text")
        self._problems.check()
        return Trace(
            intervals=tuple(found for found in intervals if found is not None),
            flows=tuple(found for found in flows if found is not None),
            clock=str(clock),
        )

    def _of(self, *kinds: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for kind in kinds:
            yield from self._by_kind.get(kind, ())

    def _interval(self, at: str, event: dict[str, Any], devices: Mapping[int, str]) -> Interval | None:
        drawn_us, pid = event.get("dur", 0.0), event.get("pid")
        if not isinstance(drawn_us, int | float) or drawn_us < 0:
            self._problems.add(at, f"runs backwards in time: dur is {drawn_us} microseconds; {_AGAIN}")
        if type(pid) is not int or pid not in devices:
            self._problems.add(at, f"no process_name event names pid {shortened(repr(pid))}")
            return None
        of = {"device": devices[pid], "lane": event.get("cat"), "name": event.get("name")}
        found = read_part(Interval, {**_args(event), **of}, at, self._problems)
        if found is not None and found.end_s < found.start_s:
            end, start = f"end_s {found.end_s:.6f}", f"start_s {found.start_s:.6f}"
            self._problems.add(f"{at}.args", f"runs backwards in time: {end} is before {start}; {_AGAIN}")
        if found is not None and found.step < 0:
            self._problems.add(f"{at}.args.step", f"must be a whole number from 0 on, got {found.step}")
        return found

    def _flow(self, at: str, event: dict[str, Any]) -> Flow | None:
        found = read_part(Flow, {**_args(event), "name": event.get("name")}, at, self._problems)
        if found is not None and min(found.step, found.size_bytes) < 0:
            self._problems.add(f"{at}.args", f"step and size_bytes must not be negative, got {found}")
        return found


def _args(event: dict[str, Any]) -> dict[str, Any]:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


DECISIONS_FORMAT = "spantrain-decisions"
_VERSION = 2
_TRAIN_AGAIN = "train again: `spantrain train` writes it"


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
    text = read_text(path, remedy=_TRAIN_AGAIN)
    if not text.endswith("\n"):
        raise ConfigError(f"{path}: its last line is cut off; {_TRAIN_AGAIN}")
    rows = [(f"{path}, line {n}", line) for n, line in enumerate(text.split("\n")[:-1], start=1)]
    head = _object(*rows[0]) if rows else {}
    if head.get("format") != DECISIONS_FORMAT:
        raise ConfigError(f"{path}: is not a {DECISIONS_FORMAT} file; {_TRAIN_AGAIN}")
    if head != {"format": DECISIONS_FORMAT, "version": _VERSION}:
        got = shortened(repr(head.get("version")))
        raise ConfigError(f"{path}, line 1: has format version {got}, this program reads {_VERSION}; {_TRAIN_AGAIN}")
    parts: list[tuple[str, dict[str, Any], list[Decision]]] = []
    for where, line in rows[1:]:
        data = _object(where, line)
        if "device" in data:
            parts.append((where, data, []))
        elif not parts:
            raise ConfigError(f"{where}: a decision stands before any line with a device; {_TRAIN_AGAIN}")
        else:
            parts[-1][2].append(from_json(Decision, data, where))
    return tuple(_device(where, head, decisions, path) for where, head, decisions in parts)


def _object(where: str, line: str) -> dict[str, Any]:
    data = parse_json(line, where, is_line=True)
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: must be an object; {_TRAIN_AGAIN}")
    return data


def _device(where: str, head: dict[str, Any], decisions: list[Decision], path: Path) -> DeviceDecisions:
    log = replace(from_json(DeviceDecisions, {**head, "decisions": []}, where), decisions=tuple(decisions))
    for before, after in pairwise(log.decisions):
        if after.now_s < before.now_s or after.step < before.step:
            raise ConfigError(
                f"{path}: {log.device}: time runs backwards, from step {before.step}, now_s {before.now_s:.6f} "
                f"({before.event}) to step {after.step}, now_s {after.now_s:.6f} ({after.event}); {_TRAIN_AGAIN}"
            )
    return log
