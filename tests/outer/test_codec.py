"""Any event and any command comes back as it was; what is malformed is refused by name."""

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.commands import OuterCommand
from spantrain.core.outer.events import OuterEvent, Ticket
from spantrain.core.outer.layers import Layer, ParameterSpec, ShardLayout, ShardRun
from spantrain.errors import ProtocolError
from spantrain.outer.link.codec import decode_command, decode_event, decode_value, encode_message, encode_value
from spantrain.outer.policy.settings import OuterSettings
from spantrain.outer.rules.nesterov import Nesterov
from spantrain.outer.rules.registry import OuterRule
from spantrain.transport.connection.peers import PeerAddress
from spantrain.transport.control.protocol import decode, encode

LIMIT = 1 << 20
counts = st.integers(0, 2**40)
tickets = st.builds(Ticket, counts, counts)
PLAIN = {
    int: counts,
    float: st.floats(allow_nan=False),
    str: st.text(max_size=8),
    bool: st.booleans(),
    Ticket: tickets,
    on.Lease: st.builds(
        on.Lease, number=counts, cluster=st.text(max_size=4), chunk=counts, data_pass=counts,
        begin=st.integers(0, 9), end=st.integers(10, 99),
    ),
    do.PushWeight: st.builds(do.PushWeight, push=tickets, part=st.floats(1e-9, 1.0)),
}  # fmt: skip


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    if kind in PLAIN:
        return PLAIN[kind]
    origin, hints = get_origin(kind), get_args(kind)
    if origin is types.UnionType:
        return st.none() | values_of(hints[0])
    if origin is tuple:
        return st.lists(values_of(hints[0]), max_size=3).map(tuple)
    if origin is Mapping:
        return st.dictionaries(values_of(hints[0]), values_of(hints[1]), max_size=3)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(list(kind))
    assert is_dataclass(kind)
    parts = {name: values_of(hint) for name, hint in get_type_hints(kind).items()}
    if "fragment" in parts:
        parts["fragment"] = st.just(0)
    if kind is do.StageVersion:
        parts |= {"scale": st.floats(0, 1), "part": st.floats(1e-9, 1.0)}
    return st.builds(kind, **parts)


fragments = st.sampled_from([0, 0, 1, 7])
bare_events = st.one_of(*(values_of(kind) for kind in get_args(OuterEvent)))
bare_commands = st.one_of(*(values_of(kind) for kind in get_args(OuterCommand)))
events = st.builds(on.of_fragment, fragments, bare_events)
commands = st.builds(on.of_fragment, fragments, bare_commands)


@settings(deadline=None, max_examples=150)
@given(events)
def test_an_event_comes_back(event: OuterEvent) -> None:
    assert decode_event(decode(encode(encode_message(event), limit_bytes=LIMIT), limit_bytes=LIMIT)) == event


@settings(deadline=None, max_examples=150)
@given(commands)
def test_a_command_comes_back(command: OuterCommand) -> None:
    assert decode_command(decode(encode(encode_message(command), limit_bytes=LIMIT), limit_bytes=LIMIT)) == command


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@settings(deadline=None, max_examples=200)
@given(events, st.data())
def test_whatever_one_field_becomes_is_read_or_refused(event: OuterEvent, data: st.DataObject) -> None:
    plain = encode_message(event)
    plain[data.draw(st.sampled_from([*plain, "new"]))] = data.draw(anything)
    try:
        read = decode_event(plain)
    except ProtocolError:
        return
    assert isinstance(read, get_args(OuterEvent))


@settings(deadline=None, max_examples=100)
@given(events, st.data())
def test_a_field_that_is_missing_is_named(event: OuterEvent, data: st.DataObject) -> None:
    plain = encode_message(event)
    names = [field.name for field in fields(event) if field.default is MISSING]
    if names:
        name = data.draw(st.sampled_from(names))
        del plain[name]
        with pytest.raises(ProtocolError, match=f"{name}: is missing"):
            decode_event(plain)


PUSH = {"kind": "PushAsked", "cluster": "a", "base_version": 1, "tokens": 5, "progress": [], "ends_round": True}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "Popen"}, r"unknown event 'Popen'"),
        ({"kind": "StartPush"}, r"unknown event 'StartPush'"),
        ({"kind": ["PushAsked"]}, r"unknown event \['PushAsked'\]"),
        ({"extra": 1}, r"PushAsked: extra: unknown key 'extra'"),
        ({"cluster": 7}, r"PushAsked: cluster: must be text, got 7"),
        ({"cluster": "x" * 70_000}, r"PushAsked: cluster: is larger than messages have it"),
        ({"tokens": True}, r"PushAsked: tokens: must be a whole number, got true"),
        ({"tokens": 1.0}, r"PushAsked: tokens: must be a whole number, got 1.0"),
        ({"tokens": 2**63}, r"PushAsked: tokens: is larger than messages have it"),
        ({"tokens": 10**5000}, r"PushAsked: tokens: is larger than messages have it"),
        ({"tokens": -1}, r"PushAsked: a: tokens must be 0 to 2\^48, a version not negative"),
        ({"progress": {}}, r"PushAsked: progress: must be a list, got an object"),
        ({"progress": [{"lease": 1, "upto": "2"}]}, r"PushAsked: progress\[0\].upto: must be a whole number"),
        ({"progress": [0] * 200_001}, r"PushAsked: progress: is larger than messages have it"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        decode_event({**PUSH, **change})


@pytest.mark.parametrize("data", [None, [], "PushSent", 3, b"x"])
def test_an_event_is_an_object(data: object) -> None:
    with pytest.raises(ProtocolError, match="must be an object"):
        decode_event(data)
    with pytest.raises(ProtocolError, match="must be an object"):
        decode_command(data)


@pytest.mark.parametrize("ticket", ["2", "2.", "a.b", "-1.2", "1.2.3", "9" * 39 + ".1.", 2.17, None])
def test_a_ticket_is_two_numbers(ticket: object) -> None:
    with pytest.raises(ProtocolError, match=r"PushSent: push: (not a ticket|must be text like \"2.17\")"):
        decode_event({"kind": "PushSent", "cluster": "a", "push": ticket})


def test_norms_that_are_not_finite_are_told() -> None:
    event = on.NormsMeasured(shard="s0", update=Ticket(1, 2), squares={Ticket(1, 1): (float("nan"), float("inf"))})
    read = decode_event(decode(encode(encode_message(event), limit_bytes=LIMIT), limit_bytes=LIMIT))
    assert isinstance(read, on.NormsMeasured)
    assert repr(read) == repr(event)


def test_two_texts_of_one_ticket_are_one_key_twice() -> None:
    plain = {"kind": "NormsMeasured", "shard": "s0", "update": "1.2", "squares": {"1.1": [], "01.1": []}}
    with pytest.raises(ProtocolError, match="a key is given twice"):
        decode_event(plain)


LAYOUT = ShardLayout(
    layers=(
        Layer(name="0", parameters=(ParameterSpec(name="0.w", shape=(2, 3), dtype="bfloat16"),)),
        Layer(name="1", parameters=(ParameterSpec(name="1.w", shape=()), ParameterSpec(name="1.b", shape=(3,)))),
    ),
    runs=(ShardRun(shard="s0", first=0, end=1), ShardRun(shard="s1", first=1, end=2)),
)


@pytest.mark.parametrize(
    "value",
    [LAYOUT, PeerAddress(name="a", endpoint="tcp://[::1]:5", public_key=""), Nesterov(), OuterSettings(clip_norm=None)],
    ids=lambda value: type(value).__name__,
)
def test_other_values_come_back(value: Any) -> None:
    kind: Any = OuterRule if isinstance(value, OuterRule) else type(value)
    assert decode_value(kind, encode_value(value), "it") == value


def test_a_rule_that_is_not_known_here_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match=r"rule: name: must be one of nesterov.*got \"adam\""):
        decode_value(OuterRule, {"name": "adam"}, "rule")  # type: ignore[type-abstract]


def test_a_layout_that_is_none_is_refused_with_its_reason() -> None:
    plain = encode_value(LAYOUT)
    plain["runs"][1]["first"] = 0
    with pytest.raises(ProtocolError, match="layout: runs must hold each of 2 layers once"):
        decode_value(ShardLayout, plain, "layout")
    plain = encode_value(LAYOUT)
    plain["layers"][0]["parameters"][0]["dtype"] = "object"
    with pytest.raises(
        ProtocolError, match=r"layout: layers\[0\].parameters\[0\]: parameter 0.w: dtype must be one of"
    ):
        decode_value(ShardLayout, plain, "layout")
