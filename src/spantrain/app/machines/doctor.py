"""Check machines and the ways between them before anything is spent on them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from spantrain.app.machines.checks import CheckLine, common_lines, line_of, machine_lines, way_lines
from spantrain.app.machines.describe import FoundMachine
from spantrain.app.reporter import Reporter
from spantrain.core.cluster import Cluster
from spantrain.core.records import Record
from spantrain.errors import PeerLostError, ProtocolError, UsageError
from spantrain.reach.facts import MachineFacts, ask_all, probe
from spantrain.reach.machines import Machine, this_machine
from spantrain.reach.pairs import PairPrograms, addresses_of, load_ways, pairs_of, try_ways
from spantrain.transport.control.address import Address

_HERE = "this-machine"
_MOST_PAIRS = 28
"""Of whom rates are measured: those of eight machines take about a minute and a half."""


class DoctorOptions(Record):
    """What to check beside the machines themselves."""

    cluster: Cluster | None = None
    """What is said to be there."""
    paths: tuple[str, ...] = ()
    """Files and folders that should be the same on all machines."""
    listen: Address | None = None
    """Where the coordinator is going to listen, on this machine."""
    quick: bool = False
    """Neither load torch nor measure rates and encryption."""


class DoctorReport(Record):
    """All lines, and how many of them there are of each verdict."""

    lines: tuple[CheckLine, ...]
    ok: int
    warn: int
    fail: int


def examine(machines: Sequence[Machine], options: DoctorOptions, reporter: Reporter) -> DoctorReport:
    """Check machines; what cannot be reached becomes a line, and the others are checked all the same."""
    lines = tuple(_lines(machines, options, reporter))
    count = Counter(line.verdict for line in lines)
    return DoctorReport(lines=lines, ok=count["ok"], warn=count["warn"], fail=count["fail"])


def _lines(machines: Sequence[Machine], options: DoctorOptions, reporter: Reporter) -> Iterator[CheckLine]:
    deep = not options.quick
    reporter.phase(f"Asking {len(machines)} machine{'s' * (len(machines) != 1)}" + (", with torch" if deep else ""))
    answers = ask_all(machines, lambda machine, stop: probe(machine, stop, deep=deep, paths=options.paths))
    found = []
    for machine, facts in zip(machines, answers, strict=True):
        if isinstance(facts, MachineFacts):
            found.append(FoundMachine(machine=machine, facts=facts))
            text = f"{facts.hostname}, {facts.processors} processors, {', '.join(facts.addresses) or 'no address'}"
            yield line_of("reach", machine.name, text)
        else:
            text, _, remedy = str(facts).removeprefix(f"{machine}: ").partition("; ")
            yield line_of("reach", machine.name, text, remedy or "see what it prints there", fails=True)
    alone = all(machine.way == "local" for machine in machines)
    for one in found:
        yield from machine_lines(one, cluster=options.cluster, deep=deep, testbed=alone)
    compared = list(found)
    if all(machine.way != "local" for machine in machines):  # with code and data of this one, as far as it has them
        here = this_machine(_HERE)
        facts = probe(here, paths=options.paths)
        there = {what: digest for what, digest in facts.digests.items() if digest != "missing"}
        compared.insert(0, FoundMachine(machine=here, facts=replace(facts, digests=there)))
    yield from common_lines(compared, options.paths)
    if len(found) > 1:
        yield from _between(found, options, reporter)
    if options.listen is not None:
        yield from _coordinator(found, options.listen)


def _between(found: Sequence[FoundMachine], options: DoctorOptions, reporter: Reporter) -> Iterator[CheckLine]:
    given = {host.name: (host.address,) for host in (options.cluster.hosts if options.cluster else ()) if host.address}
    own = {one.machine.name: addresses_of(one.machine, one.facts) for one in found}
    # Where a file says it, workers are dialled just there.
    addresses = {name: given.get(name, addresses) for name, addresses in own.items()}
    reporter.phase("Trying the ways between them")
    try:
        with PairPrograms([one.machine for one in found]) as programs:
            ways = try_ways(programs, addresses)
            pairs = pairs_of(list(addresses))
            if not options.quick:
                reporter.phase(f"Measuring rates, about {3 * min(len(pairs), _MOST_PAIRS)} s")
                ways = load_ways(programs, ways, pairs[:_MOST_PAIRS])
    except (PeerLostError, ProtocolError) as error:
        yield line_of("ports", "all", str(error), "see why a Python program ends there", fails=True)
        return
    yield from way_lines(list(addresses), ways)
    if len(pairs) > _MOST_PAIRS and not options.quick:
        yield line_of("rate", "all", f"rates were measured of the first {_MOST_PAIRS} of {len(pairs)} pairs")


def _coordinator(found: Sequence[FoundMachine], listen: Address) -> Iterator[CheckLine]:
    """Yield whether the coordinator could listen here, on its two ports, and the machines could join it."""
    others = [one.machine for one in found if one.machine.way != "local"]
    ports = (listen.port, listen.control_neighbour().port)
    try:
        listen.check_free()
        with PairPrograms([this_machine(_HERE), *others]) as programs:
            for port in ports:
                programs.listen(_HERE, port)
            ways = {
                (machine.name, port): programs.dial(machine.name, _HERE, [listen.as_dialled().host], port=port)
                for machine in others for port in ports
            }  # fmt: skip
    except (PeerLostError, ProtocolError, UsageError) as error:
        text, _, remedy = str(error).partition("; ")
        yield line_of("coordinator", _HERE, text, remedy or "end what listens there (ss -ltnp)", fails=True)
        return
    yield line_of("coordinator", _HERE, f"ports {ports[0]} and {ports[1]} are free")
    for (name, port), way in ways.items():
        tried = "; ".join(f"{address}: {why}" for address, why in way.errors.items())
        text = f"reaches {listen.host}:{port}" if way.is_open else f"cannot connect to {listen.host}:{port} ({tried})"
        remedy = "" if way.is_open else f"let this machine's firewall pass TCP to ports {ports[0]} and {ports[1]}"
        yield line_of("coordinator", f"{name}->here", text, remedy, fails=not way.is_open)
