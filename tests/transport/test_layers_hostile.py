"""What a hostile peer may send to a layer wire: bounded, refused by name, and of no harm to the others."""

import msgpack
import pytest

from spantrain.core.outer.layers import ParameterSpec
from spantrain.transport.layers.format import DATA, decode_refused, encode_pair
from testing.outer.layer_wires import WORDS, a_key, has_refused, opened, still_takes

WORDS_OF_BYTES = [ParameterSpec(name="w", shape=(1000,), dtype="uint8")]


def test_names_of_others_cannot_write_on_a_terminal(intruder, caplog):
    wires, shard, _, (_, data) = intruder
    shard.expect("b", a_key(), WORDS)
    data.send(opened(a_key(), [ParameterSpec(name="w\x1b[2J\r\n", shape=(100,))]))
    assert "w?[2J??: got" in wires.heard["s"].reason("b", a_key())
    has_refused(shard, {"not as expected": 1})
    assert "\x1b" not in caplog.text


def test_a_layer_over_the_limit_is_refused_before_it_is_expected(intruder):
    wires, shard, worker, (control, data) = intruder
    data.send(opened(a_key(), [ParameterSpec(name="w", shape=(2**32,))]))
    assert "oversized: 17179869184 bytes, at most 8589934592 are allowed" in decode_refused(control.recv())[1]
    still_takes(wires, shard, worker)
    has_refused(shard, {"oversized": 1})


def test_bytes_in_too_many_pieces_are_refused(intruder):
    wires, shard, worker, (control, data) = intruder
    data.send(opened(a_key(), WORDS_OF_BYTES))
    for k in range(400):
        data.send_multipart([encode_pair(DATA, 0, k), b"x"])
    assert "over 260 pieces came before it was expected" in decode_refused(control.recv())[1]
    still_takes(wires, shard, worker)
    has_refused(shard, {"not expected": 1})


def test_parameters_of_layers_that_nobody_expects_are_bounded(intruder):
    wires, shard, worker, (control, data) = intruder
    many = [ParameterSpec(name=f"{k}", shape=(1,)) for k in range(8192)]
    for number in range(3):
        data.send(opened(a_key(number), many, number))
    assert decode_refused(control.recv())[0] == 2
    still_takes(wires, shard, worker)
    has_refused(shard, {"not expected": 1})


@pytest.mark.parametrize(
    "message",
    [
        [b"?"],
        [b"O"],
        [b"O" + bytes(8) + b"\x93\x01\x02\x03"],
        [b"O" + bytes(8) + b"\xdf\xff\xff\xff\xff"],
        [b"D" + bytes(16)],
        [b"D" + bytes(3), b"x"],
        [b"O" + bytes(8) + msgpack.packb([1, 2, ["push"], 0, [["w", "float32", [100]]]])],
        [b"O" + bytes(8) + msgpack.packb([1, 2, {}, 0, [["w", "float32", [100]]]])],
        [b"O" + bytes(8) + b"\x95\x01\x02" + b"\x91" * 1000 + b"\x01\x00\x90"],
        [b"O" + bytes(8) + msgpack.packb([1, 2, "push", 0, [["w", "float32", [2**62] * 16]]])],
        [b"O" + bytes(8) + msgpack.packb([1, 2, "push", 0, [["w", ["float32"], [1]]]])],
        [b"G" + bytes(15)],
        [b"N"],
        [b"C", b"x"],
        [b""],
    ],
)
def test_what_is_not_in_the_protocol_is_counted_and_changes_nothing(intruder, message):
    wires, shard, worker, (_, data) = intruder
    data.send_multipart(message)
    shard.expect("b", a_key(), WORDS)
    data.send(opened(a_key(), WORDS))
    data.send_multipart([encode_pair(DATA, 0, 0), bytes(400)])
    wires.heard["s"].layer("b", a_key())
    still_takes(wires, shard, worker)
    has_refused(shard, {"malformed": 1})
