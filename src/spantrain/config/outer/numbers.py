"""The numbers of an outer.yaml: how often clusters exchange, how a step is made, how the master decides."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from spantrain.config.files.yaml_fields import Field
from spantrain.core.quantities import parse_seconds
from spantrain.formats.registry import WireFormat

_MOST_STEPS = 10**9
_MOST_FRAGMENTS = 1000
_SWITCH = {"on": True, "off": False}


@dataclass(frozen=True, kw_only=True)
class RuleNumbers:
    """Of the outer step; None for what the program does by itself, here and below."""

    learning_rate: float | None = None
    momentum: float | None = None


@dataclass(frozen=True, kw_only=True)
class GuardNumbers:
    """Of the guard against bad updates."""

    smoothing: float | None = None
    factor: float | None = None
    warm_up: int | None = None
    wild: float | None = None
    restart_after: int | None = None


@dataclass(frozen=True, kw_only=True)
class SettingNumbers:
    """Of the master."""

    grace_s: float | None = None
    clip_norm: float | None = None
    clipped: bool = True
    """False where the file says `clip_norm: none`."""
    part_steps: bool | None = None
    """Whether a window that holds pushes of some clusters steps a part of the way."""
    common_rounds: bool | None = None
    """Whether who has done a whole round ends that of the others."""
    ahead: float | None = None
    """How much of a round to train on behind a push; None, as where the file says `none`: as much as it takes."""
    staleness_power: float | None = None
    """How much less a push weighs that is older by versions."""
    compensation: float | None = None
    """How far a push is corrected that began from an older version."""
    lost_after_s: float | None = None
    transfer_limit_s: float | None = None
    lease_s: float | None = None
    shard_slots: int | None = None
    worker_slots: int | None = None
    push_format: WireFormat | None = None
    """What pseudo-gradients are sent as."""
    fragments: int | None = None
    """Of the layers, each exchanged at steps of its own."""


@dataclass(frozen=True, kw_only=True)
class OuterNumbers:
    """All of them."""

    inner_steps: int = 64
    """Of a cluster between two pushes."""
    rule: RuleNumbers = field(default_factory=RuleNumbers)
    settings: SettingNumbers = field(default_factory=SettingNumbers)
    guard: GuardNumbers = field(default_factory=GuardNumbers)


def read_numbers(top: Mapping[str, Field]) -> OuterNumbers:
    """Read `inner_steps`, `rule`, `settings` and `guard`; what is wrong becomes problems."""
    inner_steps = top["inner_steps"].count(most=_MOST_STEPS) if "inner_steps" in top else OuterNumbers().inner_steps
    return OuterNumbers(
        inner_steps=inner_steps,
        rule=_rule(top.get("rule")),
        settings=_settings(top.get("settings")),
        guard=_guard(top.get("guard")),
    )


def read_switch(at: Field) -> bool:
    """Return whether it says `on`; what is neither on nor off becomes a problem."""
    text = _text(at)
    if text not in _SWITCH:
        at.problem("must be on or off" if text is None else f"{text!r} must be on or off")
    return _SWITCH.get(text or "", True)


def _rule(at: Field | None) -> RuleNumbers:
    row = _row(at, "learning_rate", "momentum")
    return RuleNumbers(
        learning_rate=_number(row, "learning_rate", lambda value: value > 0, "more than 0"),
        momentum=_number(row, "momentum", lambda value: 0 <= value < 1, "at least 0 and less than 1"),
    )


def _settings(at: Field | None) -> SettingNumbers:
    row = _row(
        at,
        "grace",
        "clip_norm",
        "part_steps",
        "common_rounds",
        "ahead",
        "staleness_power",
        "compensation",
        "lost_after",
        "transfer_limit",
        "lease",
        "shard_slots",
        "worker_slots",
        "push_format",
        "fragments",
    )
    clipped = not ("clip_norm" in row and _text(row["clip_norm"]) == "none")
    return SettingNumbers(
        grace_s=_seconds(row, "grace", zero_allowed=True),
        clip_norm=_number(row, "clip_norm", lambda value: value > 0, "more than 0, or none") if clipped else None,
        clipped=clipped,
        part_steps=read_switch(row["part_steps"]) if "part_steps" in row else None,
        common_rounds=read_switch(row["common_rounds"]) if "common_rounds" in row else None,
        ahead=_ahead(row),
        staleness_power=_number(row, "staleness_power", lambda value: 0 <= value <= 10, "from 0 to 10"),
        compensation=_number(row, "compensation", lambda value: 0 <= value <= 1, "from 0 to 1"),
        lost_after_s=_seconds(row, "lost_after"),
        transfer_limit_s=_seconds(row, "transfer_limit"),
        lease_s=_seconds(row, "lease"),
        shard_slots=row["shard_slots"].count() if "shard_slots" in row else None,
        worker_slots=row["worker_slots"].count() if "worker_slots" in row else None,
        push_format=_wire_format(row["push_format"]) if "push_format" in row else None,
        fragments=row["fragments"].count(most=_MOST_FRAGMENTS) if "fragments" in row else None,
    )


def _ahead(row: Mapping[str, Field]) -> float | None:
    if "ahead" in row and _text(row["ahead"]) == "none":
        return None
    return _number(row, "ahead", lambda value: 0 <= value <= 1, "from 0 to 1, or none")


def _wire_format(at: Field) -> WireFormat | None:
    text = _text(at)
    if text in [one.value for one in WireFormat]:
        return WireFormat(text)
    got = "" if text is None else f"{text!r} "
    at.problem(f"{got}must be one of {', '.join(WireFormat)}")
    return None


def _guard(at: Field | None) -> GuardNumbers:
    row = _row(at, "smoothing", "factor", "warm_up", "wild", "restart_after")
    warm_up = row["warm_up"].count(most=10**6) if "warm_up" in row else None
    if warm_up == 1:
        row["warm_up"].problem("must be at least 2: one norm has no deviation")
    return GuardNumbers(
        smoothing=_number(row, "smoothing", lambda value: 0 < value < 1, "between 0 and 1"),
        factor=_number(row, "factor", lambda value: value >= 1, "at least 1"),
        warm_up=warm_up,
        wild=_number(row, "wild", lambda value: value > 1, "more than 1"),
        restart_after=row["restart_after"].count(most=10**6) if "restart_after" in row else None,
    )


def _row(at: Field | None, *known: str) -> dict[str, Field]:
    nothing = at is None or (at.is_list_or_empty and not at.is_list)
    return {} if nothing or at is None else at.table(required=(), optional=known)


def _text(at: Field) -> str | None:
    return None if at.is_table or at.is_list else at.text()


def _seconds(row: Mapping[str, Field], key: str, *, zero_allowed: bool = False) -> float | None:
    return row[key].quantity(parse_seconds, zero_allowed=zero_allowed) if key in row else None


def _number(row: Mapping[str, Field], key: str, holds: Callable[[float], bool], wanted: str) -> float | None:
    value = row[key].number() if key in row else None
    if value is not None and not holds(value):
        row[key].problem(f"{value:g} must be {wanted}")
    return value
