"""Events and commands of the outer optimizer as plain values for the control plane, and back, strictly.

As `json_codec` writes their dataclasses; an event or a command has its name beside its fields, and the number of its
fragment if that is over 0. Nothing is looked up by a name that came over the network but in the tables here.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, get_args

from spantrain.config.files.json_codec import from_json, to_json
from spantrain.config.files.problems import shortened
from spantrain.core.outer.commands import OuterCommand
from spantrain.core.outer.events import OuterEvent
from spantrain.errors import ProtocolError

T = TypeVar("T")
_KIND, _FRAGMENT = "kind", "fragment"
_EVENTS = {kind.__name__: kind for kind in get_args(OuterEvent)}
_COMMANDS = {kind.__name__: kind for kind in get_args(OuterCommand)}


def encode_message(one: OuterEvent | OuterCommand) -> dict[str, Any]:
    """Return an event or a command as plain values.

    >>> from spantrain.core.outer.events import PushSent, Ticket
    >>> encode_message(PushSent(cluster="a", push=Ticket(2, 17)))
    {'kind': 'PushSent', 'cluster': 'a', 'push': '2.17'}
    """
    plain = encode_value(one)
    if not one.fragment:
        del plain[_FRAGMENT]
    return {_KIND: type(one).__name__, **plain}


def encode_value(value: object) -> Any:
    """Return plain values for a dataclass; numbers that are not finite may be what somebody measured."""
    return to_json(value, wire=True)


def decode_value(kind: type[T], data: object, where: str) -> T:
    """Return a dataclass from plain values; `where` is its name in errors.

    Raises:
        ProtocolError: it is none.
    """
    return from_json(kind, data, where, error=ProtocolError, wire=True)


def _decode_kind(table: Mapping[str, type[Any]], what: str, data: object) -> Any:
    """Return the event or command in some plain values.

    Raises:
        ProtocolError: it is none; the message says which field is wrong, and how.
    """
    if not isinstance(data, dict):
        raise ProtocolError(f"the {what} must be an object, got a {type(data).__name__}")
    name = data.get(_KIND)
    if not isinstance(name, str) or name not in table:
        raise ProtocolError(f"unknown {what} {shortened(repr(name))}: install the same SpanTrain on both sides")
    one = decode_value(table[name], {key: value for key, value in data.items() if key != _KIND}, name)
    if one.fragment < 0:
        raise ProtocolError(f"{name}.{_FRAGMENT}: must not be negative, got {one.fragment}")
    return one


decode_event: Callable[[object], OuterEvent] = partial(_decode_kind, _EVENTS, "event")
decode_command: Callable[[object], OuterCommand] = partial(_decode_kind, _COMMANDS, "command")
