"""What devices answer that were asked to measure a link."""

import pytest

from spantrain.app.profiling.profile import measured_link
from spantrain.config.files.json_codec import to_json
from spantrain.core.profile import LinkMeasurement
from spantrain.errors import PeerLostError
from spantrain.runtime.worker.worker_protocol import LinkResult

UP = LinkMeasurement(source="a", target="b", latency_s=0.01, bandwidth_bytes_per_s=1e6, payload_bytes=1000, rounds=1)


def test_a_measured_link_is_read():
    answer = {"result": to_json(LinkResult(links=(UP,)))}
    assert measured_link("a", "b", answer).links == (UP,)


def test_a_device_that_gave_up_on_the_other_is_named_with_what_to_do():
    """A very slow link ends like that: neither side is lost, one has only waited too long."""
    answer = {"error": "no answer from b in 60 s", "caused_elsewhere": True, "usage": False}
    with pytest.raises(
        PeerLostError, match=r"between a and b could not be measured: no answer from b in 60 s.*data sheets"
    ):
        measured_link("a", "b", answer)
