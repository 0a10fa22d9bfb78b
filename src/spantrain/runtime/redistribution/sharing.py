"""Devices of one place that lack the same: each takes a part of it from afar, and gives that to the others. Pure."""

from collections.abc import Collection, Mapping, Sequence

from spantrain.runtime.redistribution.transfer import Described, ExchangeGroup

_IN_SITE = 1
"""Nearness up to which devices are in one place."""


def takers_of(
    group: ExchangeGroup, alike: Sequence[str], wanted: Collection[str], files: Mapping[str, Described]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return several devices, and who of them takes a tensor from afar, by name, of those that nobody near holds.

    All of the several come to the same answer; nobody and nothing, where there is nothing to be divided.

    Args:
        group: all devices of an exchange, as one of the several sees them.
        alike: devices that are to hold the same, all of it.
        wanted: names of what they are to hold.
        files: what each device holds.
    """
    near = [name for name in (group.own, *group.peers) if name == group.own or group.nearness(name) <= _IN_SITE]
    several = sorted(set(alike) & set(near))
    if group.own not in several or len(several) < 2:
        return (), {}
    held = {tensor for name in near if name in files for tensor in files[name].tensors}
    lacking = [(number, name) for number, name in enumerate(sorted(wanted)) if name not in held]
    return tuple(several), {name: several[number % len(several)] for number, name in lacking}
