"""Facts of machines, and what goes between them, as a cluster: hosts with their devices, sites, links;
and kinds that nobody has described, measured.
"""

import datetime
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise, permutations
from statistics import median

from spantrain.app.reporter import Reporter
from spantrain.config.kinds import kind_named, load_kinds
from spantrain.core.cluster import Cluster, Device, DeviceKind, Host, Link, Site
from spantrain.core.records import Record
from spantrain.devices.registry import Backend, find_backend
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
from spantrain.reach.machines import MAX_ANSWER_BYTES, PYTHON, Machine, run_python, this_machine
from spantrain.reach.pairs import Pair, PairPrograms, PairReport, addresses_of, load_ways, pairs_of, try_ways
from spantrain.runtime.launch.environment import Environment

SAME_SITE_S = 0.003
"""A round trip that is shorter stays in one place: light goes 300 km and back in it, networks much less."""
_BACKENDS = {"nvidia": "cuda", "jetson": "cuda", "amd": "cuda", "intel": "xpu", "apple": "mps"}
"""Of vendors; torch for ROCm calls AMD's GPUs cuda."""
_SHARED_MEMORY = ("jetson", "apple")
_GUESSED = DeviceKind(
    name="guessed", peak_fp16_flop_per_s=20e12, peak_fp32_flop_per_s=10e12, memory_bytes=8 * 2**30,
    memory_bandwidth_bytes_per_s=300e9, power_w=200.0, source="",
)  # fmt: skip
_SITE_RATE, _SITE_LATENCY_S = 1.25e9, 1e-4
_LINK_RATE, _LINK_LATENCY_S = 12.5e6, 0.02
_MIB = 2**20


class FoundMachine(Record):
    """A machine that is to be a host."""

    machine: Machine
    facts: MachineFacts


@dataclass(kw_only=True)
class ClusterDraft:
    """What is found out on the way to a cluster."""

    machines: Sequence[FoundMachine]
    ways: Mapping[Pair, PairReport] = field(default_factory=dict)
    """Empty where nothing was tried."""
    measured_kinds: Mapping[str, DeviceKind] = field(default_factory=dict)
    """By a GPU's name, those that no data sheet of ours is for."""
    notes: list[str] = field(default_factory=list)
    """What to say above the file: what was assumed, what is missing."""

    def cluster(self, name: str) -> Cluster:
        """Return the cluster; the notes are whole then."""
        sites = self._sites()
        devices = [device for one in self.machines for device in self._devices(one, sites[one.machine.name])]
        names = list(dict.fromkeys(sites.values()))
        kinds = {kind.name: kind for kind in (*load_kinds().values(), *self.measured_kinds.values())}
        used = {device.kind for device in devices}
        return Cluster(
            name=name,
            description=f"{len(devices)} device{'s' * (len(devices) != 1)} of {len(self.machines)} machine"
            f"{'s' * (len(self.machines) != 1)}, as found by spantrain init",
            kinds=tuple(kind for kind in kinds.values() if kind.name in used),
            sites=tuple(self._site(site, [host for host in sites if sites[host] == site]) for site in names),
            hosts=tuple(
                Host(
                    name=one.machine.name,
                    site=sites[one.machine.name],
                    devices=tuple(device.name for device in devices if device.host == one.machine.name),
                    address=self._address(one),
                    ssh=one.machine.target if one.machine.way == "ssh" else None,
                    python=one.machine.python if one.machine.way == "ssh" and one.machine.python != PYTHON else None,
                    memory_bytes=_beside_devices(one),
                )
                for site in names for one in self.machines if sites[one.machine.name] == site
            ),
            devices=tuple(device for site in names for device in devices if device.site == site),
            links=tuple(self._link(source, target, sites) for source, target in permutations(names, 2)),
        )  # fmt: skip

    def _devices(self, one: FoundMachine, site: str) -> list[Device]:
        """Return the accelerators that SpanTrain can use, or else the processor."""
        host = one.machine.name
        found: list[Device] = []
        for accelerator in one.facts.accelerators:
            backend = usable_backend(accelerator)
            if backend is None:
                self.notes.append(
                    f"{host}: {accelerator.name} cannot be used yet (no backend for {accelerator.vendor})"
                )
                continue
            if backend.name == "xpu":
                self.notes.append(f"{host}: no GPU has confirmed backend xpu; `backend: cpu` is the way out")
            number = sum(entry.backend.startswith(backend.name) for entry in found)
            named = f"{backend.name}:{number}" if backend.numbered else backend.name
            own = self.measured_kinds.get(accelerator.name)
            kind = own.name if own else kind_named(accelerator.name)
            assert kind is not None, f"{accelerator.name} is of no kind, and was not measured"
            found.append(self._device(one, site, kind, named, accelerator))
        if len({device.kind for device in found}) > 1:
            self.notes.append(
                f"{host}: its GPUs are numbered as the driver does: set CUDA_DEVICE_ORDER=PCI_BUS_ID there"
            )
        if not found:
            found = [self._device(one, site, "cpu", "cpu", None)]
        if len(found) == 1:
            return found
        return [replace(device, name=f"{host}-gpu{index}") for index, device in enumerate(found)]

    def _device(
        self, one: FoundMachine, site: str, kind: str, backend: str, accelerator: FoundAccelerator | None
    ) -> Device:
        shared = accelerator is None or accelerator.vendor in _SHARED_MEMORY
        memory = one.facts.free_bytes if shared else accelerator.memory_bytes if accelerator else None
        usual = self.measured_kinds.get(accelerator.name) if accelerator else None
        whole = int(memory or 0) // _MIB * _MIB or (usual or load_kinds()[kind]).memory_bytes
        host = one.machine.name
        return Device(name=host, kind=kind, host=host, site=site, backend=backend, memory_bytes=whole)

    def _address(self, one: FoundMachine) -> str | None:
        """Return where most others have reached it; where nothing was tried, its first address."""
        if len(self.machines) == 1:
            return None
        name = one.machine.name
        used = Counter(way.address for (_, to), way in self.ways.items() if to == name and way.is_open)
        first = next(iter(one.facts.addresses), None)
        return used.most_common(1)[0][0] if used else one.machine.called() or first

    def _sites(self) -> dict[str, str]:
        """Return each machine's site, in the machines' order: as said, else by round trips or networks."""
        found = {one.machine.name: one.machine.site or "" for one in self.machines}
        open_ = [one for one in self.machines if one.machine.site is None]
        group = {one.machine.name: one.machine.name for one in open_}
        for one, other in combinations(open_, 2):
            a, b = one.machine.name, other.machine.name
            if self._are_near(one, other) and group[a] != group[b]:
                old, new = group[b], group[a]
                group = {name: new if label == old else label for name, label in group.items()}
        sizes, taken = Counter(group.values()), set(found.values())
        names: dict[str, str] = {}
        for label in dict.fromkeys(group.values()):
            several = (f"site-{number}" for number in range(1, len(found) + len(taken) + 2))
            free = (name for name in several if name not in taken and name not in names.values())
            names[label] = label if sizes[label] == 1 and label not in taken else next(free)
        return {name: site or names[group[name]] for name, site in found.items()}

    def _are_near(self, one: FoundMachine, other: FoundMachine) -> bool:
        ways = self._ways(one.machine.name, other.machine.name)
        if self.ways:
            return any(way.round_trip_s < SAME_SITE_S for way in ways)
        return any(
            mine.network == theirs.network and mine.network.prefixlen >= 16
            for a in one.facts.interfaces for mine in a.networks()
            for b in other.facts.interfaces for theirs in b.networks()
        )  # fmt: skip

    def _ways(self, one: str, other: str) -> list[PairReport]:
        both = (self.ways.get((one, other)), self.ways.get((other, one)))
        return [way for way in both if way is not None and way.is_open]

    def _site(self, name: str, hosts: Sequence[str]) -> Site:
        ways = [way for pair in combinations(hosts, 2) for way in self._ways(*pair)]
        rates = [rate for way in ways for rate in (way.up_bytes_per_s, way.down_bytes_per_s) if rate and rate > 0]
        if len(hosts) > 1 and not rates:
            self.notes.append(f"site {name}: its network is assumed, not measured")
        return Site(
            name=name,
            hosts=tuple(hosts),
            bandwidth_bytes_per_s=_rounded(median(rates)) if rates else _SITE_RATE,
            latency_s=round(median(way.round_trip_s for way in ways) / 2, 5) if ways else _SITE_LATENCY_S,
        )

    def _link(self, source: str, target: str, sites: Mapping[str, str]) -> Link:
        """Return a link as the best pair of hosts has it: each rate was seen by one transfer."""
        names = {place: [host for host in sites if sites[host] == place] for place in (source, target)}
        pairs = [(a, b) for a in names[source] for b in names[target]]
        rates = [self.ways[pair].up_bytes_per_s for pair in pairs if pair in self.ways]
        rates += [self.ways[b, a].down_bytes_per_s for a, b in pairs if (b, a) in self.ways]
        known = [rate for rate in rates if rate and rate > 0]
        trips = [way.round_trip_s for pair in pairs for way in self._ways(*pair)]
        if not known:
            why = "no way was found; see spantrain doctor" if self.ways and not trips else "not measured"
            self.notes.append(f"link {source} -> {target}: its rate is assumed: {why}")
        return Link(
            source=source,
            target=target,
            bandwidth_bytes_per_s=_rounded(max(known)) if known else _LINK_RATE,
            latency_s=round(min(trips) / 2, 5) if trips else _LINK_LATENCY_S,
        )


def usable_backend(accelerator: FoundAccelerator) -> Backend | None:
    """Return what would compute on an accelerator; None if nothing of ours does."""
    return find_backend(_BACKENDS.get(accelerator.vendor, ""))


def guessed_kind(accelerator: FoundAccelerator, *, why: str) -> DeviceKind:
    """Return figures for a GPU that nothing is known of, to start from; its source says so."""
    source = f"a guess, since {why}; spantrain profile measures"
    return own_kind(accelerator, fp16=0, fp32=0, memory_rate=0, source=source)


def _beside_devices(one: FoundMachine) -> int | None:
    """Return the processor's memory where devices have one of their own; None: there is none, or it is not known."""
    own = [found for found in one.facts.accelerators if found.vendor not in _SHARED_MEMORY]
    return int(one.facts.free_bytes or 0) // _MIB * _MIB or None if own else None


def own_kind(accelerator: FoundAccelerator, *, fp16: float, fp32: float, memory_rate: float, source: str) -> DeviceKind:
    """Return a kind under a GPU's own name, with what was measured of it; 0 is not."""
    name = re.sub(r"[^a-z0-9]+", "-", accelerator.name.lower().removeprefix("nvidia ")).strip("-")[:60] or "gpu"
    return DeviceKind(
        name=f"{name}-gpu" if name in load_kinds() else name,
        peak_fp16_flop_per_s=_rounded(fp16) or _GUESSED.peak_fp16_flop_per_s,
        peak_fp32_flop_per_s=_rounded(fp32) or _GUESSED.peak_fp32_flop_per_s,
        memory_bytes=int(accelerator.memory_bytes or _GUESSED.memory_bytes),
        memory_bandwidth_bytes_per_s=_rounded(memory_rate) or _GUESSED.memory_bandwidth_bytes_per_s,
        power_w=accelerator.power_w or _GUESSED.power_w,
        source=source,
    )


def _rounded(value: float) -> float:
    """Return three digits of a number: more than a second's measuring is good for."""
    return float(f"{value:.3g}")


_MEASURE_S = 180.0
_PROBE_S, _GATHER_S = 60.0, 120.0
"""Of a machine under torchrun by itself, and until all of them have told."""
_MOST_PAIRS = 45
"""Of whom rates are measured, one pair after the other: those of ten machines."""


class InitOutcome(Record):
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
    machines = named_machines((one.hostname for one in facts), "ssh", python=PYTHON)
    found = [FoundMachine(machine=machine, facts=one) for machine, one in zip(machines, facts, strict=True)]
    return described_cluster(found, name=name, measure=False, reporter=reporter)
