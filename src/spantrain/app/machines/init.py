"""Machines in, a cluster out: what they are, what goes between them, and kinds that nobody has described, measured."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spantrain.app.machines.describe import ClusterDraft, FoundMachine, guessed_kind, own_kind, usable_backend
from spantrain.app.reporter import Reporter
from spantrain.config.kinds import kind_named
from spantrain.core.cluster import Cluster, DeviceKind
from spantrain.errors import PeerLostError, ProtocolError, SpanTrainError
from spantrain.reach.facts import (
    CheckedAnswer,
    FoundAccelerator,
    MachineFacts,
    ask_all,
    probe,
    program,
    read_answer,
)
from spantrain.reach.machines import Machine, run_python
from spantrain.reach.pairs import Pair, PairPrograms, PairReport, addresses_of, load_ways, pairs_of, try_ways

_MEASURE_S = 180.0
_MOST_PAIRS = 45
"""Of whom rates are measured, one pair after the other: those of ten machines."""


@dataclass(frozen=True, kw_only=True)
class InitOutcome:
    """A cluster as it was found, and what to say of it."""

    cluster: Cluster
    notes: tuple[str, ...]


def found_cluster(machines: Sequence[Machine], *, name: str, measure: bool, reporter: Reporter) -> InitOutcome:
    """Ask machines what they are, try what goes between them, and return them as a cluster.

    Args:
        machines: at least one.
        name: of the cluster.
        measure: whether to try ways between machines and to measure unknown kinds; else both are assumed.
        reporter: hears of progress.

    Raises:
        PeerLostError: machines cannot be reached or asked; all of them are told.
    """
    reporter.phase(f"Asking {len(machines)} machine{'s' * (len(machines) != 1)}")
    answers = ask_all(machines, probe)
    failed = [str(answer) for answer in answers if isinstance(answer, SpanTrainError)]
    if failed:
        raise PeerLostError("\n  ".join([f"{len(failed)} of {len(machines)} machines did not answer:", *failed]))
    found = [
        FoundMachine(machine=machine, facts=facts)
        for machine, facts in zip(machines, answers, strict=True)
        if isinstance(facts, MachineFacts)
    ]
    return described_cluster(found, name=name, measure=measure, reporter=reporter)


def described_cluster(found: Sequence[FoundMachine], *, name: str, measure: bool, reporter: Reporter) -> InitOutcome:
    """Return machines whose facts are known as a cluster; else as `found_cluster`."""
    draft = ClusterDraft(machines=found, notes=[])
    draft.measured_kinds = _unknown_kinds(found, measure=measure, reporter=reporter)
    if measure and len(found) > 1:
        reporter.phase("Trying the ways between them")
        draft.ways = _ways(found, reporter)
    elif len(found) > 1:
        draft.notes.append("networks and links are assumed, nothing was measured; spantrain profile measures them")
    cluster = draft.cluster(name)
    return InitOutcome(cluster=cluster, notes=tuple(draft.notes))


def _ways(found: Sequence[FoundMachine], reporter: Reporter) -> dict[Pair, PairReport]:
    machines = [one.machine for one in found]
    addresses = {one.machine.name: addresses_of(one.machine, one.facts) for one in found}
    with PairPrograms(machines) as programs:
        ways = try_ways(programs, addresses)
        chosen = pairs_of(list(addresses))
        if len(chosen) > _MOST_PAIRS:
            chosen = list(zip(list(addresses), list(addresses)[1:], strict=False))
            reporter.note(f"Rates are measured between neighbours in the list only: {len(chosen)} pairs")
        return load_ways(programs, ways, chosen)


@dataclass(frozen=True, kw_only=True)
class _Rates(CheckedAnswer):
    float16: float = 0.0
    float32: float = 0.0
    memory: float = 0.0
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class _AllRates(CheckedAnswer):
    gpus: Mapping[str, _Rates] = field(default_factory=dict)


def _unknown_kinds(found: Sequence[FoundMachine], *, measure: bool, reporter: Reporter) -> dict[str, DeviceKind]:
    """Return a kind for each GPU that no data sheet of ours is for, measured on the first machine that has it."""
    kinds: dict[str, DeviceKind] = {}
    for one in found:
        usable = [accelerator for accelerator in one.facts.accelerators if usable_backend(accelerator)]
        for number, accelerator in enumerate(usable):
            if accelerator.name in kinds or kind_named(accelerator.name) is not None:
                continue
            if not measure:
                kinds[accelerator.name] = guessed_kind(accelerator, why="nothing was measured")
                continue
            reporter.phase(f"Measuring {accelerator.name} of {one.machine.name}, of which there is no data sheet here")
            kinds[accelerator.name] = _measured(one.machine, accelerator, number)
    return kinds


def _measured(machine: Machine, accelerator: FoundAccelerator, number: int) -> DeviceKind:
    try:
        said = run_python(machine, program("rates"), str(number), timeout_s=_MEASURE_S)
        rates = read_answer(_AllRates, said.strip().rpartition("\n")[2], f"rates of {machine}").gpus.get(str(number))
    except (PeerLostError, ProtocolError) as error:
        return guessed_kind(accelerator, why=f"it could not be measured ({str(error)[:150]})")
    if rates is None or rates.error:
        return guessed_kind(accelerator, why=f"torch cannot use it ({rates.error[:150] if rates else 'no answer'})")
    source = f"measured by spantrain init on {machine.name}, {datetime.date.today()}: products of 4096 x 4096, a copy"
    return own_kind(accelerator, fp16=rates.float16, fp32=rates.float32, memory_rate=rates.memory, source=source)
