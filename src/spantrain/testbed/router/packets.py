"""Read from the raw bytes of a TUN device what the router must know: where to, which flow, how many bytes."""

from spantrain.testbed.router.shaper import Packet

LOAD_TYPE_OF_SERVICE = 0x20
"""What marks the packets of traffic that was made to compete: "lower effort", class selector 1 (RFC 4594).

The router does not treat them otherwise, it counts them apart.
"""

OFFLOAD_HEADER_BYTES = 10
"""Of `struct virtio_net_hdr`, which stands before each packet (Linux: Documentation/networking/tuntap.rst)."""
_TCP, _UDP = 6, 17
_CLASS = 0xFC
"""The two bits below are for congestion marks."""


def parse_packet(data: bytes) -> Packet | None:
    """Return the packet; None if not IPv4. The site that it is for is the second byte of the destination's address.

    With segmentation offload the kernel hands over up to 64 kB of one TCP flow as one packet; it is charged for the
    headers of each of the packets that it stands for.
    """
    start = OFFLOAD_HEADER_BYTES
    if len(data) < start + 20 or data[start] >> 4 != 4:
        return None
    header_bytes = (data[start] & 15) * 4
    protocol = data[start + 9]
    flow = data[start + 9 : start + 10] + data[start + 12 : start + 20]
    fragment = (data[start + 6] & 0x3F) | data[start + 7]
    if protocol in (_TCP, _UDP) and not fragment:
        flow += data[start + header_bytes : start + header_bytes + 4]
    wire_bytes, count = len(data) - start, 1
    segment_bytes = int.from_bytes(data[4:6], "little")
    if data[1] and segment_bytes and protocol == _TCP:
        headers = header_bytes + (data[start + header_bytes + 12] >> 4) * 4
        count = max(1, -(-(wire_bytes - headers) // segment_bytes))
        wire_bytes += (count - 1) * headers
    is_load = data[start + 1] & _CLASS == LOAD_TYPE_OF_SERVICE
    return Packet(data, flow, wire_bytes, count, data[start + 17], is_load)
