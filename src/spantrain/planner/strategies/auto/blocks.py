"""Blocks of devices that the search moves together: single devices in small clusters, parts of a class in large."""

from dataclasses import dataclass

from spantrain.core.profile import Profile
from spantrain.planner.strategies.auto.moves import Block
from spantrain.planner.strategies.auto.parts import PartCosts

_MOST_BLOCKS = 24
_MOST_POINTS = 40
_BY_HOST_UP_TO = 8
_SPEED_AT = 4
"""Samples at which kinds are compared."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Blocks with what the search asks of each."""

    blocks: tuple[Block, ...]
    classes: tuple[object, ...]
    """Equal for blocks that stand for each other."""
    groups: tuple[tuple[int, ...], ...]
    """Blocks of one kind in one site, by falling speed."""
    sites: tuple[str, ...]
    """By block."""


def blocks_of(profile: Profile, devices: tuple[str, ...], costs: PartCosts) -> Blocks:
    """Return the blocks of devices; no block has devices of two kinds, memories or sites."""
    table = profile.cluster.device_by_name
    members: dict[tuple[object, ...], list[str]] = {}
    for name in devices:
        device = table[name]
        shared = len(profile.cluster.host_by_name[device.host].devices) > 1
        host = device.host if shared and len(devices) <= _BY_HOST_UP_TO else ""
        members.setdefault((device.site, device.kind, device.memory_bytes, device.backend, host), []).append(name)
    blocks: list[Block] = []
    classes: list[object] = []
    # Powers of two: hosts mostly hold as many, and stages of such widths hand over without many small pieces.
    width = 1
    while len(devices) > width * _MOST_BLOCKS:
        width *= 2
    for key, names in members.items():
        for first in range(0, len(names), width):
            block = tuple(names[first : first + width])
            blocks.append(block)
            classes.append((key, len(block)))
    groups: dict[tuple[str, str], list[int]] = {}
    for number, block in enumerate(blocks):
        device = table[block[0]]
        groups.setdefault((device.site, device.kind), []).append(number)

    def seconds(number: int) -> float:
        return costs.replica_seconds(blocks[number][0], _SPEED_AT)

    return Blocks(
        blocks=tuple(blocks),
        classes=tuple(classes),
        groups=tuple(sorted(map(tuple, groups.values()), key=lambda group: seconds(group[0]))),
        sites=tuple(table[block[0]].site for block in blocks),
    )


def grid_of(units: int) -> tuple[int, ...]:
    """Return the units at which cuts may lie: all of them, or evenly spread ones."""
    if units <= _MOST_POINTS:
        return tuple(range(units + 1))
    return tuple(sorted({round(k * units / _MOST_POINTS) for k in range(_MOST_POINTS + 1)}))


def site_distances(profile: Profile, blocks: Blocks) -> dict[tuple[str, str], float]:
    """Return the seconds of a message of a mebibyte between sites, of one device each."""
    first = {site: block[0] for site, block in reversed(list(zip(blocks.sites, blocks.blocks, strict=True)))}
    found = {}
    for a, one in first.items():
        for b, other in first.items():
            if a != b:
                link = profile.link_by_pair.get((one, other))
                found[a, b] = float("inf") if link is None else link.latency_s + link.busy_seconds(2**20)
    return found
