"""The best order of work of all, by branch and bound: for small steps, to know how good the program's search is.

It branches as Giffler and Thompson do ("Algorithms for solving production-scheduling problems", 1960): of all actions
that could come next, take the device of the one that would end first, and try every action of that device that could
start before that end. The orders made in this way contain a best one. Micro-batches must be alike: then the oldest
sample first loses nothing, since any two that are at the same place may change names.
"""

from dataclasses import dataclass

from spantrain.sim.search.model import Message, Orders, StepModel


@dataclass(frozen=True, kw_only=True)
class Exhausted:
    """What a search came to."""

    seconds: float
    """What the shortest order found takes; or what was to be beaten, where nothing did."""
    orders: Orders | None
    """By device: the part that each action is of; None where nothing beat what was to be beaten."""
    proven: bool
    """Whether no order is shorter; False: it gave up."""


def shortest(model: StepModel, *, beat_s: float, enough_s: float = 0.0, max_nodes: int = 200_000) -> Exhausted:
    """Return the shortest order; `beat_s` are those of a known one, `enough_s` a lower bound.

    Raises:
        ValueError: micro-batches are not alike, or a link carries more than one sort of message.
    """
    if unlike := _unlike(model):
        raise ValueError(f"{unlike} for an exhaustive search")
    search = _BranchAndBound(model, beat_s, enough_s, max_nodes)
    search.go()
    return Exhausted(seconds=search.best_s, orders=search.best, proven=search.nodes_left > 0)


def _unlike(model: StepModel) -> str:
    """Return why a model is none to search; empty if it is one."""
    rows = [row for parts in model.seconds for row in parts] + model.sizes
    if any(len(set(row)) > 1 for row in rows) or len(set(map(len, model.sizes))) > 1:
        return "micro-batches must be alike"
    senders: dict[int, tuple[int, int]] = {}
    for device, parts in enumerate(model.messages):
        for part, row in enumerate(parts):
            for link in {message[0] for sent in row for message in sent}:
                if senders.setdefault(link, (device, part)) != (device, part):
                    return "every link must have one sort of message"
    return ""


class _BranchAndBound:
    def __init__(self, model: StepModel, beat_s: float, enough_s: float, max_nodes: int) -> None:
        self.best_s = beat_s
        self.best: Orders | None = None
        self.nodes_left = max_nodes
        self._enough_s = enough_s
        self._model = model
        self._free_s = [0.0] * len(model.seconds)
        self._begun = [[0] * len(parts) for parts in model.seconds]
        self._held = [0] * len(model.seconds)
        self._link_s = [0.0] * model.num_links
        self._ended_s = [[[0.0] * len(row) for row in parts] for parts in model.seconds]
        self._arrived_s = [[[0.0] * len(row) for row in parts] for parts in model.seconds]
        self._awaited = [[row.copy() for row in parts] for parts in model.awaited]
        self._after_s = _after_s(model)
        self._done: list[tuple[int, int]] = []
        self._total = sum(len(row) for parts in model.seconds for row in parts)

    def go(self) -> None:
        """Try everything that could be better than the best so far."""
        if self.best_s <= self._enough_s * (1 + 1e-9) or self.nodes_left <= 0:
            return
        self.nodes_left -= 1
        able = self._able()
        if not able:
            if len(self._done) == self._total and max(self._free_s) < self.best_s:
                self.best_s = max(self._free_s)
                self.best = [[part for at, part in self._done if at == device] for device in range(len(self._free_s))]
            return
        _, _, first = min((start_s + self._model.seconds[at][part][0], at, at) for start_s, at, part in able)
        until_s = min(s + self._model.seconds[at][part][0] for s, at, part in able if at == first)
        rivals = sorted(entry for entry in able if entry[1] == first and entry[0] < until_s)
        for start_s, device, part in rivals or [min(entry for entry in able if entry[1] == first)]:
            undo = self._do(start_s, device, part)
            if self._least_s() < self.best_s * (1 - 1e-9):
                self.go()
            self._undo(device, part, *undo)

    def _able(self) -> list[tuple[float, int, int]]:
        """Return what could come next on each device: earliest start, device, part."""
        found = []
        for device, begun in enumerate(self._begun):
            for part, index in enumerate(begun):
                if index == len(self._model.sizes[device]) or self._awaited[device][part][index]:
                    continue
                if part and begun[part - 1] <= index:
                    continue
                if not part and self._held[device] + self._model.sizes[device][index] > self._model.limits[device]:
                    continue
                found.append((max(self._free_s[device], self._arrived_s[device][part][index]), device, part))
        return found

    def _do(self, start_s: float, device: int, part: int) -> tuple[float, list[tuple[Message, float, float]]]:
        """Put an action at the end of its device's order; return what undoing needs."""
        index = self._begun[device][part]
        before_s = self._free_s[device]
        end_s = self._free_s[device] = start_s + self._model.seconds[device][part][index]
        self._begun[device][part] += 1
        self._hold(device, part, index, 1)
        self._done.append((device, part))
        sent = []
        for message in self._model.messages[device][part][index]:
            link, busy_s, lag_s, target, target_part, target_index = message
            arrived = self._arrived_s[target][target_part]
            sent.append((message, self._link_s[link], arrived[target_index]))
            self._link_s[link] = max(self._link_s[link], end_s) + busy_s
            arrived[target_index] = max(arrived[target_index], self._link_s[link] + lag_s)
            self._awaited[target][target_part][target_index] -= 1
        return before_s, sent

    def _undo(self, device: int, part: int, before_s: float, sent: list[tuple[Message, float, float]]) -> None:
        self._done.pop()
        self._free_s[device] = before_s
        self._begun[device][part] -= 1
        self._hold(device, part, self._begun[device][part], -1)
        for message, link_s, arrived_s in reversed(sent):
            link, _, _, target, target_part, target_index = message
            self._link_s[link] = link_s
            self._arrived_s[target][target_part][target_index] = arrived_s
            self._awaited[target][target_part][target_index] += 1

    def _hold(self, device: int, part: int, index: int, sign: int) -> None:
        """Count a sample as held from its first part to its last."""
        if part == 0:
            self._held[device] += sign * self._model.sizes[device][index]
        elif part == len(self._begun[device]) - 1:
            self._held[device] -= sign * self._model.sizes[device][index]

    def _least_s(self) -> float:
        """Return seconds that no completion of what has been done so far can beat."""
        least_s = 0.0
        for device, begun in enumerate(self._begun):
            seconds, count = self._model.seconds[device], len(self._model.sizes[device])
            now_s = self._free_s[device]
            for part, index in enumerate(begun):
                if index < count:
                    now_s += (count - index) * seconds[part][0]
                    least_s = max(least_s, now_s + self._after_s[device][part])
            least_s = max(least_s, now_s)
        return least_s


def _after_s(model: StepModel) -> list[list[float]]:
    """Return, by device and part, the least seconds from its end to the end of the step: the longest way there."""
    known: dict[tuple[int, int], float] = {}

    def after(device: int, part: int) -> float:
        if (device, part) not in known:
            ways = [
                busy_s + lag_s + model.seconds[target][target_part][0] + after(target, target_part)
                for _, busy_s, lag_s, target, target_part, _ in model.messages[device][part][0]
            ]
            if part + 1 < len(model.seconds[device]):
                ways.append(model.seconds[device][part + 1][0] + after(device, part + 1))
            known[device, part] = max(ways, default=0.0)
        return known[device, part]

    return [[after(device, part) for part in range(len(parts))] for device, parts in enumerate(model.seconds)]
