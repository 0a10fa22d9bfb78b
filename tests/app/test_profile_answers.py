"""What is said of a device that was asked to measure a link and gave up on the other."""

from spantrain.app.profiling.profile import unmeasured


def test_a_device_that_gave_up_on_the_other_is_named_with_what_to_do():
    """A very slow link ends like that: neither side is lost, one has only waited too long."""
    text = str(unmeasured("a", "b", "no answer from b in 60 s"))
    assert "between a and b could not be measured: no answer from b in 60 s" in text
    assert text.endswith("plan by data sheets (spantrain plan --preset|--cluster)")
