"""Random places of four devices in a pipeline of five units."""

from itertools import pairwise
from random import Random

from spantrain.core.span import Span

BATCH = 6
THIRDS = (Span(0, 2), Span(2, 4), Span(4, 6))
HALVES = (Span(0, 3), Span(3, 6))
UNEVEN = (Span(0, 1), Span(1, 5), Span(5, 6))


def random_places(random: Random):
    """Cuts of five units, and four devices in any groups."""
    devices = random.sample("abcd", 4)
    count = random.randint(1, 4)
    edges = [0, *sorted(random.sample(range(1, 5), count - 1)), 5]
    borders = [0, *sorted(random.sample(range(1, 4), count - 1)), 4]
    stages = []
    for index in range(count):
        members = devices[borders[index] : borders[index + 1]]
        cuts = [0, *[at for at in range(1, len(members)) if random.random() < 0.5], len(members)]
        stages.append([members[lo:hi] for lo, hi in pairwise(cuts)])
    return edges, stages, random.choice([THIRDS, HALVES, UNEVEN]), random.choice(["gpipe", "critical-path", "zb"])
