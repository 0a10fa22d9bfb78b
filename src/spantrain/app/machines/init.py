"""Machines in, a cluster out: what they are, what goes between them, and kinds that nobody has described, measured."""

import datetime
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from spantrain.app.machines.describe import ClusterDraft, FoundMachine, guessed_kind, own_kind, usable_backend
from spantrain.app.reporter import Reporter
from spantrain.config.kinds import kind_named
from spantrain.core.cluster import Cluster, DeviceKind
from spantrain.errors import PeerLostError, ProtocolError, SpanTrainError, UsageError
from spantrain.reach.allocations import named_machines
from spantrain.reach.facts import (
    CheckedAnswer,
    FoundAccelerator,
    MachineFacts,
    ask_all,
    probe,
    program,
    read_answer,
    read_facts,
)
from spantrain.reach.machines import MAX_ANSWER_BYTES, Machine, run_python, this_machine
from spantrain.reach.pairs import PairPrograms, addresses_of, load_ways, pairs_of, try_ways
from spantrain.runtime.launch.environment import Environment

_MEASURE_S = 180.0
_PROBE_S, _GATHER_S = 60.0, 120.0
"""Of a machine under torchrun by itself, and until all of them have told."""
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
        addresses = {one.machine.name: addresses_of(one.machine, one.facts) for one in found}
        with PairPrograms([one.machine for one in found]) as programs:
            ways = try_ways(programs, addresses)
            chosen = pairs_of(list(addresses))
            if len(chosen) > _MOST_PAIRS:
                chosen = list(pairwise(addresses))
                reporter.note(f"Rates are measured between neighbours in the list only: {len(chosen)} pairs")
            draft.ways = load_ways(programs, ways, chosen)
    elif len(found) > 1:
        draft.notes.append("networks and links are assumed, nothing was measured; spantrain profile measures them")
    cluster = draft.cluster(name)
    return InitOutcome(cluster=cluster, notes=tuple(draft.notes))


@dataclass(frozen=True, kw_only=True)
class _Rates(CheckedAnswer):
    float16: float = 0.0
    float32: float = 0.0
    memory: float = 0.0
    error: str = ""


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
        rates = read_answer(_Rates, said.strip().rpartition("\n")[2], f"rates of {machine}")
    except (PeerLostError, ProtocolError) as error:
        return guessed_kind(accelerator, why=f"it could not be measured ({str(error)[:150]})")
    if rates.error:
        return guessed_kind(accelerator, why=f"torch cannot use it ({rates.error[:150]})")
    source = f"measured by spantrain init on {machine.name}, {datetime.date.today()}: products of 4096 x 4096, a copy"
    return own_kind(accelerator, fp16=rates.float16, fp32=rates.float32, memory_rate=rates.memory, source=source)


def gathered_cluster(*, name: str, reporter: Reporter) -> InitOutcome | None:
    """Tell of this machine under torchrun; rank 0 returns the cluster of all, in the order of ranks, the others None.

    Each process knows its own machine, so one of each tells rank 0 through torchrun's store. That has no
    authentication: what comes out of it is read like any answer from elsewhere, within bounds.

    Nothing is measured between machines: the processes come and go together, and their ports are torchrun's.

    Raises:
        UsageError: this is not under torchrun.
        PeerLostError: the others are not heard of.
    """
    environment = Environment.read(os.environ)
    launch = environment.launch
    if launch is None or launch.local_rank is None:
        raise UsageError(
            "--torchrun: RANK or LOCAL_RANK is not set; run it as `torchrun ... --no-python spantrain init --torchrun`"
        )
    from torch.distributed import DistError, TCPStore

    here = this_machine("here")
    said = run_python(here, program("probe"), timeout_s=_PROBE_S).strip() if launch.local_rank == 0 else ""
    try:
        store = TCPStore(
            launch.master_address,
            launch.master_port,
            launch.world_size,
            is_master=launch.rank == 0 and not environment.agent_has_store,
            timeout=datetime.timedelta(seconds=_GATHER_S),
        )
        keys = [f"spantrain-init/{rank}" for rank in range(launch.world_size)]
        store.set(keys[launch.rank], said)
        if launch.rank != 0:
            return None
        store.wait(keys)
        texts = [store.get(key)[:MAX_ANSWER_BYTES].decode(errors="replace") for key in keys]
    except (DistError, RuntimeError, OSError) as error:
        raise PeerLostError(f"torchrun's store at {launch.master_address}: {str(error)[:300]}") from None
    facts = [read_facts(text, f"answer of rank {rank}") for rank, text in enumerate(texts) if text]
    machines = named_machines((one.hostname for one in facts), "ssh", python=sys.executable)
    found = [FoundMachine(machine=machine, facts=one) for machine, one in zip(machines, facts, strict=True)]
    return described_cluster(found, name=name, measure=False, reporter=reporter)
