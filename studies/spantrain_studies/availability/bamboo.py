"""Bamboo (Thorpe et al., NSDI 2023): redundant computation, so that a neighbour goes on for a lost device.

Kept: D equal pipelines of P stages; each device also holds the next stage's state (memory is checked) and does its
forward in the bubbles, which lengthens a step by what bubbles lack; after a loss the neighbour does both stages' work,
and the run stands still while it computes again what the lost one had in flight; no step is lost. At the end of a step,
lost places are filled by devices that stand by, which copy both stages' state; damaged pipelines are given up, or new
ones made, where samples/s rise by a factor that is tuned; devices that are in no equal pipeline stand by. A stage that
no device holds any more, as when neighbours of the only pipeline go, means a restart from a checkpoint. P is tuned.

In its favour: besides what `layouts` says, bubbles hide redundant work wholly; other pipelines' copies of a stage serve
where both neighbours are lost; pipelines keep their own part of the batch, so that steps count by their samples; a
change takes as long as our light one. The first stage's work goes to the second, in the place of the last.
"""

from collections.abc import Sequence

from spantrain.core.action import Op
from spantrain.cost.memory import MemoryCost
from spantrain.sim.availability import PREPARED_S
from spantrain_studies.availability.chains import Chain, Chains
from spantrain_studies.availability.layouts import Laid
from spantrain_studies.availability.plans import write_s
from spantrain_studies.availability.run import Turn, Work

Line = tuple[str | None, ...]
"""A pipeline: the device of each stage; None: its neighbour does its work."""


def designs(chains: Chains, present: frozenset[str], most: int) -> list[Laid]:
    """Return the best equal grids with room for the next stage's state, one for each number of stages."""
    found = []
    for places in range(2, min(len(present), chains.whole.units) + 1):
        fits = [laid for laid in chains.whole.grids(present, (places,)) if _has_room(chains, laid)]
        found += fits[:1]
    return sorted(found, key=lambda laid: laid.step_s)[:most]


def _has_room(chains: Chains, laid: Laid) -> bool:
    memory = MemoryCost(chains.profile, chains.job.optimizer, laid.plan.dtype)
    peaks, place = memory.plan_peak_bytes(laid.plan), chains.profile.cluster.device_by_name
    stages = laid.plan.stages
    behind = [memory.state_bytes(stage.units) for stage in (*stages[1:], stages[0])]
    return all(
        peaks[name] + more <= place[name].memory_bytes
        for stage, more in zip(stages, behind, strict=True)
        for name in stage.devices
    )


class Bamboo:
    """Keeps equal pipelines, with neighbours in the place of lost devices."""

    def __init__(self, chains: Chains, design: Laid, *, restart_s: float, every_s: float, worth: float) -> None:
        """Begin with nothing; `design`: the grid of all devices; the other arguments are those of `restart.Restart`."""
        self._chains, self._design, self._restart_s = chains, design, restart_s
        self.every_s, self._worth = every_s, worth
        self._places, self._width = len(design.slots), len(design.slots[0])
        self._part = max(1, chains.job.global_batch // self._width)
        self._lines: tuple[Line, ...] = ()
        self._work: Work | None = None
        self._known: dict[tuple[Line, ...], Work | None] = {}

    def begin(self, present: frozenset[str]) -> Work | None:
        """Begin with the grid, or what devices there are of it."""
        whole = tuple(tuple(slot[index] for slot in self._design.slots) for index in range(self._width))
        self._lines = whole if {name for line in whole for name in line} <= present else self._filled((), present)
        self._work = self._of(self._lines)
        return self._work

    def lost(self, device: str, present: frozenset[str]) -> Turn:
        """Let a neighbour go on; where it is gone too, give the pipeline up; without any copy of a stage, restart."""
        (hurt,) = [line for line in self._lines if device in line]
        stage = hurt.index(device)
        line = tuple(None if name == device else name for name in hurt)
        neighbour = line[stage - 1]
        kept = tuple(one for one in self._lines if one is not hurt)
        if neighbour is not None and (work := self._of((*kept, line))) is not None:
            self._lines, self._work = (*kept, line), work
            return Turn(work=work, pause_s=self._again_s(neighbour, stage), loses_step=False, settle=True)
        if (work := self._of(kept)) is not None:
            self._lines, self._work = kept, work
            return Turn(work=work, pause_s=PREPARED_S, settle=True)
        self._lines = self._filled((), present)
        self._work = self._of(self._lines)
        if self._work is None:
            self._lines = ()
            return Turn(work=None, back=True)
        return Turn(work=self._work, pause_s=self._restart_s + self._copy_s({}), back=True)

    def changed(self, present: frozenset[str]) -> Turn | None:
        """Fill lost places with who stands by, give pipelines up or make new ones, if that makes steps better."""
        options = [self._filled(self._lines[:kept], present) for kept in range(len(self._lines) + 1)]
        if self._lines:
            order = sorted(self._lines, key=lambda line: line.count(None))
            options += [self._filled(tuple(order[:kept]), present) for kept in range(1, len(order) + 1)]
        works = [(work, lines) for lines in options if (work := self._of(lines)) is not None]
        if not works:
            return None
        best, lines = max(works, key=lambda entry: _rate(entry[0]))
        before = self._work
        if before is not None and _rate(best) * self._worth < _rate(before):
            return None
        held = self._held() if before is not None else {}
        self._lines, self._work = lines, best
        return Turn(work=best, pause_s=(PREPARED_S if held else self._restart_s) + self._copy_s(held))

    def _filled(self, lines: tuple[Line, ...], present: frozenset[str]) -> tuple[Line, ...]:
        """Return pipelines with the fastest of all others in lost places, and new ones of what is left."""
        used = {name for line in lines for name in line}
        spare = [name for name in self._chains.whole.fastest(present) if name not in used]
        rows = []
        for line in lines:
            rows.append(tuple(name if name is not None or not spare else spare.pop(0) for name in line))
        while len(rows) < self._width and len(spare) >= self._places:
            rows.append(self._chains.whole.in_places([spare.pop(0) for _ in range(self._places)]))
        return tuple(rows)

    def _of(self, lines: tuple[Line, ...]) -> Work | None:
        if lines not in self._known:
            self._known[lines] = self._work_of(lines)
        return self._known[lines]

    def _work_of(self, lines: tuple[Line, ...]) -> Work | None:
        merged = [self._merged(line) for line in lines]
        row = [chain for chain in merged if chain is not None]
        if not row or len(row) < len(lines):
            return None
        counts = [self._part] * len(row)
        extra_s = [self._redundant_s(chain) for chain in row]
        step_s = None if None in extra_s else self._chains.step_s(row, counts, [part or 0.0 for part in extra_s])
        if step_s is None:
            return None
        job = self._chains.job
        return Work(
            step_s=step_s, samples=sum(counts),
            devices=frozenset(name for line in lines for name in line if name is not None),
            write_s=write_s(self._chains.profile, job.optimizer, list(row[0].stages.values())),
        )  # fmt: skip

    def _merged(self, line: Line) -> Chain | None:
        """Return the pipeline with neighbours in lost places; None where two in a row are lost."""
        begins, devices = [0], list[str]()
        for stage, name in enumerate(line):
            if name is None:
                if line[stage - 1] is None:
                    return None
                if stage:
                    begins[-1] = self._design.begins[stage + 1]
                continue
            devices.append(name)
            begins.append(self._design.begins[stage + 1])
        return Chain(devices=tuple(devices), begins=tuple(begins)) if devices else None

    def _redundant_s(self, chain: Chain) -> float | None:
        """Return what a step takes longer for the next stages' forward: what bubbles have no room for."""
        took = self._chains.time(chain, self._part)
        if took is None:
            return None
        stages = list(chain.stages.items())
        longest_s = 0.0
        for (name, _), (_, behind), busy in zip(stages, (*stages[1:], stages[0]), took.busy, strict=True):
            again_s = self._forward_s(name, behind) * self._part
            longest_s = max(longest_s, again_s - (1 - busy) * took.step_s)
        return longest_s if len(stages) > 1 else 0.0

    def _forward_s(self, name: str, units: Sequence[int]) -> float:
        """Return the seconds of the forward of a sample."""
        kind = self._chains.profile.cluster.device_by_name[name].kind
        compute = self._chains.whole.assembler.spans.compute
        return compute.kind_seconds(range(units[0], units[-1] + 1), kind, Op.FORWARD, 1)

    def _again_s(self, name: str, stage: int) -> float:
        """Return the seconds of the backward, two forwards, of what a stage of 1F1B had in flight, on its neighbour."""
        units = range(self._design.begins[stage], self._design.begins[stage + 1])
        size = max(1, self._design.plan.stages[0].micro_batches[0].size // self._width)
        return 2 * self._forward_s(name, units) * min(self._part, (self._places - stage) * size)

    def _held(self) -> dict[str, set[int]]:
        """Return the units whose state each device has: its own, and those of the stages that it stands in for."""
        found: dict[str, set[int]] = {}
        begins = self._design.begins
        for line in self._lines:
            for stage, name in enumerate(line):
                if name is not None:
                    behind = (stage + 1) % self._places
                    found[name] = {
                        *range(begins[stage], begins[stage + 1]), *range(begins[behind], begins[behind + 1])
                    }  # fmt: skip
        return found

    def _copy_s(self, held: dict[str, set[int]]) -> float:
        return self._chains.copy_s(held, self._held())


def _rate(work: Work) -> float:
    return work.samples / work.step_s
