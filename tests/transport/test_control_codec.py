"""What the codec takes and what it refuses; nothing in the control plane pickles."""

import ast
import pickle
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spantrain.transport.control
from spantrain.errors import ProtocolError
from spantrain.transport.control.protocol import decode, encode

LIMIT = 1 << 16
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=10)
    | st.binary(max_size=10)
)
plain = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.text(max_size=5), plain, max_size=4))
def test_plain_payloads_come_back(payload: dict[str, Any]) -> None:
    assert decode(encode(payload, limit_bytes=LIMIT), limit_bytes=LIMIT) == payload


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        payload = decode(data, limit_bytes=LIMIT)
    except ProtocolError:
        return
    assert isinstance(payload, dict)


def test_a_tuple_is_sent_as_a_list() -> None:
    assert decode(encode({"spans": ((0, 4), (4, 8))}, limit_bytes=LIMIT), limit_bytes=LIMIT) == {
        "spans": [[0, 4], [4, 8]]
    }


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"a": {"b": [object()]}}, r"payload.a.b\[0\]: object is not a plain value"),
        ({"a": {1: 2}}, "payload.a: keys must be text, got 1"),
        ({"a": msgpack.ExtType(1, b"x")}, "ExtType is not"),
        ({"a": msgpack.Timestamp(1)}, "Timestamp is not"),
        ({"a": 2**64}, "does not fit"),
        ({"a": _nested(40)}, "goes deeper"),
        ([1], r"list"),
    ],
)
def test_what_is_not_plain_is_the_caller_s_mistake(payload: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        encode(payload, limit_bytes=LIMIT)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        msgpack.packb([1]),
        msgpack.packb({"a": msgpack.ExtType(5, b"x")}),
        msgpack.packb({"a": msgpack.Timestamp(1)}),
        msgpack.packb({1: 2}),
        msgpack.packb({b"a": 2}),
        msgpack.packb({"a": 1}) + b"\x00",
        msgpack.packb({"a": 1})[:-1],
        b"\x82\xa1a\x01\xa1a\x02",  # one key twice
        b"\x81\xa1a\xa2\xff\xfe",  # not UTF-8
        b"\xdd\xff\xff\xff\xff",  # a list of four thousand million, it says
        b"\x81\xa1a" + b"\x91" * 2000 + b"\x00",
        msgpack.packb({"a": _nested(40)}),
        bytes(LIMIT + 1),
        pickle.dumps({"a": 1}),
    ],
)
def test_what_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data, limit_bytes=LIMIT)


def test_what_takes_far_more_to_read_than_to_send_is_refused() -> None:
    """A long key that is told of each value, lists of nothing: a megabyte that took a minute, or half a gigabyte."""
    refused = {
        r"keys may have 512 characters, got 'kkk": msgpack.packb({"k" * 500_000: [None] * 400_000}),
        "over 1048576 values": msgpack.packb({"a": [[[]] * 1000] * 1100}),
        "max_array_len": msgpack.packb({"a": [None] * 2_000_000}),
    }
    for told, data in refused.items():
        with pytest.raises(ProtocolError, match=told):
            decode(data, limit_bytes=8 * 2**20)


def test_too_much_to_send() -> None:
    with pytest.raises(ProtocolError, match="send less"):
        encode({"a": bytes(LIMIT)}, limit_bytes=LIMIT)


def test_nothing_in_the_control_plane_can_execute_what_arrives() -> None:
    names: set[str] = set()
    for path in Path(spantrain.transport.control.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add((node.module or "").split(".")[0])
            elif isinstance(node, ast.Name):
                names.add(node.id)
    assert not names & {"pickle", "marshal", "shelve", "dill", "cloudpickle", "eval", "exec", "torch"}
