"""The wire formats by name: what floating-point tensors may be sent as, the most exact first."""

from enum import StrEnum
from typing import Self

from spantrain.formats.codec import CastCodec, WireCodec
from spantrain.formats.float16 import Float16
from spantrain.formats.int4 import Int4
from spantrain.formats.int8 import Int8


class WireFormat(StrEnum):
    """What floating-point tensors are sent as; all others are sent as they are (`docs/wire-formats.md`).

    >>> [(one.value, one.codec.entries(256)) for one in WireFormat]
    [('native', 256), ('float16', 514), ('bfloat16', 256), ('int8', 260), ('int4', 136)]
    """

    codec: WireCodec

    def __new__(cls, codec: WireCodec | str) -> Self:
        """Make the member of a codec, under the codec's name; afterwards, `WireFormat("int8")` finds it by that."""
        assert isinstance(codec, WireCodec)
        member = str.__new__(cls, codec.name)
        member._value_, member.codec = codec.name, codec
        return member

    NATIVE = WireCodec("native")
    """As they were computed: exact."""
    FLOAT16 = Float16("float16")
    BFLOAT16 = CastCodec("bfloat16", number_bytes=2)
    """Half the bytes of float32, 8 bits of mantissa."""
    INT8 = Int8("int8")
    INT4 = Int4("int4")
