"""What a run logged, read strictly: trace.json, which `schedule.render.perfetto` wrote, and decisions.jsonl.

The first line of decisions.jsonl names format and version. A line with `device` begins that device's part, the lines
behind it are its decisions in order (docs/artefacts.md).
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from spantrain.config.files.json_codec import from_json, to_json
from spantrain.config.files.json_fields import JsonField, parse_file
from spantrain.config.files.parsing import parse_json
from spantrain.config.files.problems import shortened
from spantrain.config.files.text_files import read_text, write_atomically
from spantrain.core.messages import Decision, DeviceDecisions
from spantrain.core.trace import TRACE_FORMAT, TRACE_VERSION, Flow, Interval, Trace
from spantrain.errors import ConfigError

_REMEDY = "write one with `spantrain train`"
_AGAIN = "train again with `spantrain train`"


def read_trace(path: Path) -> Trace:
    """Return the trace that a file holds.

    Raises:
        ConfigError: there is no such file, it is none of ours, or events lack fields or have wrong ones.
    """
    root = parse_file(path, remedy=_REMEDY)
    other = root.value.get("otherData")
    if not isinstance(other, dict) or other.get("format") != TRACE_FORMAT:
        raise ConfigError(f"{path} is not a trace that SpanTrain wrote: it has no otherData.format {TRACE_FORMAT!r}")
    if other.get("version") != TRACE_VERSION:
        raise ConfigError(f"{path}: trace version {other.get('version')!r}, this program reads version {TRACE_VERSION}")
    events = [(event, event.child("ph").value) for event in root.child("traceEvents").items()]
    names = dict(_process(event) for event, kind in events if kind == "M" and event.value.get("name") == "process_name")
    trace = Trace(
        intervals=tuple(_interval(event, names) for event, kind in events if kind in ("X", "i")),
        flows=tuple(_flow(event) for event, kind in events if kind == "s"),
        clock=root.child("otherData").child("clock").text(),
    )
    root.problems.check()
    return trace


def _process(event: JsonField) -> tuple[int, str]:
    return event.child("pid").count(), event.child("args").child("name").text()


def _interval(event: JsonField, names: dict[int, str]) -> Interval:
    if "dur" in event.value and (drawn_us := event.child("dur").any_number()) < 0:
        event.problem(f"runs backwards in time: dur is {drawn_us} microseconds; {_AGAIN}")
    process, args = event.child("pid").count(), event.child("args")
    if process not in names:
        event.problem(f"no process_name event names pid {process}")
    start_s, end_s = args.child("start_s").any_number(), args.child("end_s").any_number()
    if end_s < start_s:
        args.problem(f"runs backwards in time: end_s {end_s:.6f} is before start_s {start_s:.6f}; {_AGAIN}")
    detail = args.child("detail").entries()
    for value in detail.values():
        if not isinstance(value.value, str | int | float):
            value.problem("must be text or a number")
    return Interval(
        device=names.get(process, "?"),
        lane=event.child("cat").text(),
        name=event.child("name").text(),
        step=args.child("step").count(least=0),
        start_s=start_s,
        end_s=end_s,
        detail={name: value.value for name, value in detail.items()},
    )


def _flow(event: JsonField) -> Flow:
    args = event.child("args")
    return Flow(
        name=event.child("name").text(),
        source=args.child("source").text(),
        target=args.child("target").text(),
        step=args.child("step").count(least=0),
        sent_s=args.child("sent_s").any_number(),
        received_s=args.child("received_s").any_number(),
        size_bytes=args.child("size_bytes").count(least=0),
    )


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
    _check_head(path, rows)
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


def _check_head(path: Path, rows: list[tuple[str, str]]) -> None:
    head = _object(*rows[0]) if rows else {}
    if head.get("format") != DECISIONS_FORMAT:
        raise ConfigError(f"{path}: is not a {DECISIONS_FORMAT} file; {_TRAIN_AGAIN}")
    if head != {"format": DECISIONS_FORMAT, "version": _VERSION}:
        got = shortened(repr(head.get("version")))
        raise ConfigError(f"{path}, line 1: has format version {got}, this program reads {_VERSION}; {_TRAIN_AGAIN}")


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
