"""trace.json -> Trace: what `schedule.render.perfetto` wrote, read strictly."""

from pathlib import Path

from spantrain.config.files.json_fields import JsonField, parse_file
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
