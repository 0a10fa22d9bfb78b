"""Makes an order of work shorter: forwards and backwards in time by turns, then swaps on the critical path."""

from dataclasses import dataclass

from spantrain.sim.search.model import Orders, Outcome, Piece, Ranks, StepModel, run_orders, run_ranks, turned


def rank_by_part(model: StepModel, preference: list[tuple[int, ...]]) -> Ranks:
    """Return ranks that prefer parts in an order, by device (the first is the best), and older micro-batches."""
    ranks: Ranks = []
    for parts, order in zip(model.seconds, preference, strict=True):
        count = len(parts[0])
        ranks.append([[float(order.index(part) * count + k) for k in range(count)] for part in range(len(parts))])
    return ranks


@dataclass(kw_only=True)
class Improver:
    """Looks for shorter orders, a set number of simulations long. The same input gives the same order."""

    model: StepModel
    enough_s: float
    """No order is shorter than this; when it is reached, or nearly, the search ends."""
    runs_left: int

    def __post_init__(self) -> None:
        self._reversed = self.model.backwards()

    def improve(self, start: Outcome) -> Outcome:
        """Return the best order found from a first one on."""
        return self._swap(self._turn(start))

    def done(self, outcome: Outcome) -> bool:
        """Whether there is nothing, or hardly anything, to gain, or no time left."""
        return outcome.seconds <= self.enough_s * (1 + 1e-4) or self.runs_left <= 0

    def _turn(self, best: Outcome) -> Outcome:
        """Go backwards in time with what ended last first, then forwards with what then began first, and so on."""
        now, failed = best, 0
        while failed < 3 and not self.done(best):
            back = run_ranks(self._reversed, turned(now.starts, -1.0))
            ranks = turned(back.starts, -1.0)
            now = run_ranks(self.model, ranks)
            now = min(now, run_orders(self.model, _orders(ranks), now.seconds), key=lambda outcome: outcome.seconds)
            self.runs_left -= 3
            failed += 1
            if now.seconds < best.seconds * (1 - 1e-9):
                best, failed = now, 0
            if now.seconds == float("inf"):
                break
        return best

    def _swap(self, best: Outcome) -> Outcome:
        """Swap neighbours on the critical path as long as that helps."""
        now = best
        seen = {_key(now.orders)}
        # Sideways steps are taken, steps back are not.
        while not self.done(best):
            following: Outcome | None = None
            for orders in _swaps(now):
                key = _key(orders)
                if key in seen or self.runs_left <= 0:
                    continue
                seen.add(key)
                self.runs_left -= 1
                tried = run_orders(self.model, orders, now.seconds * (1 + 1e-9))
                if following is None or tried.seconds < following.seconds:
                    following = tried
                if tried.seconds < now.seconds * (1 - 1e-9):
                    break
            if following is None or following.seconds > now.seconds * (1 + 1e-9):
                return best
            now = following
            best = min(best, now, key=lambda outcome: outcome.seconds)
        return best


def _orders(ranks: Ranks) -> Orders:
    """Return the order of rising ranks of each device, each part by rising micro-batch."""
    return [
        [part for _, _, part in sorted((rank, k, part) for part, row in enumerate(parts) for k, rank in enumerate(row))]
        for parts in ranks
    ]


def _key(orders: Orders) -> bytes:
    return b"|".join(map(bytes, orders))


def _swaps(outcome: Outcome) -> list[Orders]:
    """Return the orders in which two neighbours of a device on the critical path have changed places."""
    places = _places(outcome.orders)
    found: list[Orders] = []
    piece = outcome.last
    while piece is not None and piece in outcome.causes:
        before, same_device = outcome.causes[piece]
        if same_device:
            device, at = piece[0], places[piece]
            order = outcome.orders[device]
            for earlier in _earlier(order, at, before, piece):
                swapped = outcome.orders.copy()
                swapped[device] = [*order[:earlier], order[at], *order[earlier:at], *order[at + 1 :]]
                found.append(swapped)
        piece = before
    return found


def _earlier(order: list[int], at: int, before: Piece, piece: Piece) -> list[int]:
    """Return the positions to which an action may be brought forward: by one, and before all alike that precede it."""
    if before[1] == piece[1] or (before[2] == piece[2] and before[1] == piece[1] - 1):
        return []
    first = at - 1
    while first > 0 and order[first - 1] == order[at - 1]:
        first -= 1
    return [at - 1] if first == at - 1 else [at - 1, first]


def _places(orders: Orders) -> dict[Piece, int]:
    """Return where in its device's order each piece of work is."""
    places: dict[Piece, int] = {}
    for device, order in enumerate(orders):
        counts = [0] * (max(order, default=0) + 1)
        for at, part in enumerate(order):
            places[device, part, counts[part]] = at
            counts[part] += 1
    return places
