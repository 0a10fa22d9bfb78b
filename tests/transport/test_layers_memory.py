"""Memory that layers come into, and how often a sender hears of it."""

import pytest

from spantrain.core.outer.events import Ticket, TransferWay
from spantrain.core.outer.layers import ParameterSpec
from spantrain.transport.layers.copiers import BufferPool, ComingLayer
from spantrain.transport.layers.interface import LayerKey


def coming_layer(granted_bytes):
    key = LayerKey(ticket=Ticket(1, 1), way=TransferWay.PUSH, layer=0)
    layer = ComingLayer("a", key, 0, (ParameterSpec(name="w", shape=(100,)),), BufferPool())
    layer.granted_bytes = granted_bytes
    return layer


def test_a_sender_that_waits_for_room_hears_of_each_part():
    layer = coming_layer(granted_bytes=300)
    layer.put(0, memoryview(bytes(99)))
    assert not layer.worth_telling(100, layer.told_s + 10.0)
    layer.put(99, memoryview(bytes(1)))
    assert layer.worth_telling(100, layer.told_s)


def test_a_sender_that_may_send_all_hears_by_the_second_that_it_is_taken():
    layer = coming_layer(granted_bytes=400)
    layer.put(0, memoryview(bytes(200)))
    assert not layer.worth_telling(100, layer.told_s + 0.5)
    assert layer.worth_telling(100, layer.told_s + 1.0)


@pytest.mark.parametrize("size_bytes", [1, 65536, 5_000_000])
def test_buffers_begin_on_lines_of_the_cache_and_come_back(size_bytes):
    pool = BufferPool()
    buffer = pool.take(size_bytes)
    begin = buffer.ctypes.data
    assert begin % 64 == 0
    del buffer
    assert pool.take(size_bytes).ctypes.data == begin
