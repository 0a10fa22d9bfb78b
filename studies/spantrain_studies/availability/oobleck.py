"""Oobleck (Jang et al., SOSP 2023): unlike pipelines from templates, whose layers are held f+1 times at least.

Kept: the devices are divided into pipelines of two neighbouring sizes, two of them at least (f is 1) where that many
fit; the number is chosen by simulation; the batch is divided by the pipelines' speeds. After a loss its pipeline is
replaced by one of the template with a device less, or given to the others where it is too small; layers come
from those that hold them; the step under way is done again. Devices that come are taken in by new pipelines, where
steps get shorter by a factor that is tuned. A layer that nobody holds means a restart from a checkpoint. In its
favour: templates are cut for the devices that are there, known at once, and taken over as fast as our light change;
slow devices are left out where that is faster; with fewer than f+1 copies it goes on, until a layer is gone. Left out:
sharding within hosts, and merging of batches that are too small.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from spantrain.core.span import apportion
from spantrain.sim.availability import PREPARED_S
from spantrain_studies.availability.chains import Chain, Chains
from spantrain_studies.availability.plans import write_s
from spantrain_studies.availability.run import Turn, Work

Row = tuple[Chain, ...]
_SIMULATED = 3


class Oobleck:
    """Keeps pipelines from templates."""

    def __init__(self, chains: Chains, *, restart_s: float, every_s: float, worth: float) -> None:
        """Begin with nothing; the arguments are those of `restart.Restart`."""
        self._chains, self._restart_s, self.every_s, self._worth = chains, restart_s, every_s, worth
        self.row: Row = ()
        """Its pipelines."""
        self._work: Work | None = None

    def begin(self, present: frozenset[str]) -> Work | None:
        """Choose pipelines for these devices."""
        self.row = fresh_row(self._chains, present)
        self._work = self._work_of(self.row)
        return self._work

    def lost(self, device: str, present: frozenset[str]) -> Turn:
        """Replace the pipeline by one of a smaller template; without a copy of a layer, restart."""
        held = {name: units for chain in self.row for name, units in chain.stages.items() if name in present}
        whole = {unit for units in held.values() for unit in units} >= set(range(self._chains.whole.units))
        row = self._without(device) if whole else fresh_row(self._chains, present)
        row = row or fresh_row(self._chains, present)
        self.row, self._work = row, self._work_of(row)
        if self._work is None:
            return Turn(work=None, back=True)
        copy_s = self._chains.copy_s(held if whole else {}, _stages(row))
        return Turn(work=self._work, pause_s=copy_s + (PREPARED_S if whole else self._restart_s), back=not whole)

    def changed(self, present: frozenset[str]) -> Turn | None:
        """Choose pipelines anew, if steps get short enough."""
        row = fresh_row(self._chains, present)
        work = self._work_of(row)
        if work is None or (self._work is not None and work.step_s > self._worth * self._work.step_s):
            return None
        held = _stages(self.row) if self._work is not None else {}
        pause_s = (PREPARED_S if held else self._restart_s) + self._chains.copy_s(held, _stages(row))
        self.row, self._work = row, work
        return Turn(work=work, pause_s=pause_s)

    def _without(self, device: str) -> Row:
        """Return the pipelines without a device; empty where none of them can be."""
        kept = [chain for chain in self.row if device not in chain.devices]
        (hurt,) = [chain for chain in self.row if device in chain.devices]
        left = tuple(name for name in hurt.devices if name != device)
        smaller = self._chains.chain(left) if left else None
        if smaller is not None:
            return (*kept, smaller)
        for name in left:
            if not kept:
                return ()
            smallest = min(kept, key=lambda chain: len(chain.devices))
            grown = self._chains.chain(self._chains.whole.in_places((*smallest.devices, name)))
            if grown is not None:
                kept[kept.index(smallest)] = grown
        return tuple(kept)

    def _work_of(self, row: Row) -> Work | None:
        if not row:
            return None
        step_s = step_of(self._chains, row)
        if step_s is None:
            return None
        job = self._chains.job
        return Work(
            step_s=step_s, samples=job.global_batch,
            devices=frozenset(name for chain in row for name in chain.devices),
            write_s=min(
                write_s(self._chains.profile, job.optimizer, list(chain.stages.values())) for chain in row
            ),
        )  # fmt: skip


def step_of(chains: Chains, row: Row) -> float | None:
    """Return the seconds of a step of pipelines that divide the batch by their speeds; None where they cannot."""
    counts = apportion(chains.job.global_batch, [1 / chains.sample_s(chain) for chain in row])
    return None if min(counts) < 1 else chains.step_s(row, counts)


def fresh_row(chains: Chains, present: frozenset[str]) -> Row:
    """Return the best pipelines for devices, asked once for all that are alike; empty where none fits."""
    names = chains.profile.cluster.device_by_name
    renamed = chains.likeness.renamed({name: (0 if name in present else 1,) for name in names})
    key = frozenset(renamed[name] for name in present)
    if key not in chains.rows:
        chains.rows[key] = _best_row(chains, key)
    back = {alias: name for name, alias in renamed.items()}
    return tuple(
        Chain(devices=tuple(back[name] for name in chain.devices), begins=chain.begins) for chain in chains.rows[key]
    )


def _best_row(chains: Chains, present: frozenset[str]) -> Row:
    """Return the best of even divisions; one pipeline alone only where two do not fit."""
    found: list[tuple[float, Row]] = []
    for names in chains.whole.subsets(present):
        ordered = chains.whole.in_places(names)
        for count in range(1, len(ordered) + 1):
            for row in _divided(chains, ordered, count):
                found.append((chains.bound_s(row, chains.job.global_batch), row))
    several = [entry for entry in found if len(entry[1]) > 1]
    best: tuple[float, Row] | None = None
    for _, row in sorted(several or found, key=lambda entry: entry[0])[:_SIMULATED]:
        step_s = step_of(chains, row)
        if step_s is not None and (best is None or step_s < best[0]):
            best = (step_s, row)
    return best[1] if best is not None else ()


def _divided(chains: Chains, ordered: Sequence[str], count: int) -> Iterator[Row]:
    """Yield devices in so many pipelines: neighbours in one, and neighbours in the same stage of all."""
    ends = [round(index * len(ordered) / count) for index in range(count + 1)]
    apart = [ordered[first:end] for first, end in pairwise(ends)]
    dealt = [ordered[index::count] for index in range(count)]
    for parts in (apart, dealt) if count > 1 else (apart,):
        row = tuple(chain for names in parts if (chain := chains.chain(names)) is not None)
        if len(row) == count:
            yield row


def _stages(row: Row) -> dict[str, range]:
    return {name: units for chain in row for name, units in chain.stages.items()}
