"""Measure what a cluster can compute and send: cluster and model in, profile out."""

import datetime
import hashlib
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from spantrain.app.cache import cache_folder, cached, keep_cached
from spantrain.app.profiling.rehearsal import rehearse
from spantrain.app.profiling.slowing import MAX_REAL_COMPUTE, too_fast
from spantrain.app.reporter import Reporter
from spantrain.app.session import Session
from spantrain.config.files.json_codec import to_json
from spantrain.core.profile import DeviceScore, LinkMeasurement, Profile, Provenance, UnitTiming
from spantrain.core.records import Record
from spantrain.core.units import ModelSpec, UnitGraph
from spantrain.errors import PeerLostError
from spantrain.models.graph import build_graph
from spantrain.profiler.network import better, doubtful, expected_rates, pair_rounds, payload_cap_bytes, spread
from spantrain.runtime.control.orders import ComputeOrder, ConnectOrder, EchoOrder, LinkOrder, LinkResult
from spantrain.runtime.coordinator.roster import OrderAbandonedError
from spantrain.transport.connection.peers import PeerAddress
from spantrain.version import VERSION

_COMPUTE = "spantrain-compute"
_PROBE_GENERATION = 0
_PROCESSORS_OF_A_PAIR = 2


class ProfileOptions(Record):
    """What to measure, and how long."""

    dtype: str = "float32"
    max_samples: int = 16
    """The largest micro-batch that is measured; sizes are the powers of two up to it; larger ones are extrapolated."""
    network_rounds: int = 1
    use_cache: bool = True

    @property
    def sizes(self) -> tuple[int, ...]:
        """The micro-batch sizes measured."""
        return tuple(2**power for power in range(self.max_samples.bit_length()) if 2**power <= self.max_samples)


class _Compute(Record):
    timings: tuple[UnitTiming, ...]
    scores: tuple[DeviceScore, ...]


def measure_profile(session: Session, model: ModelSpec, options: ProfileOptions, reporter: Reporter) -> Profile:
    """Measure every device and every pair of them."""
    cluster = session.cluster
    graph = build_graph(model, dtype=options.dtype)
    started_s = time.monotonic()
    compute = _compute(session, model, graph, options, reporter)
    compute_s = time.monotonic() - started_s
    started_s = time.monotonic()
    links: list[LinkMeasurement] = []
    for number in range(options.network_rounds):
        reporter.phase(f"Measuring the network, round {number + 1} of {options.network_rounds}")
        links.extend(_network_round(session, reporter))
    session.generations.taken(_PROBE_GENERATION)
    network_s = (time.monotonic() - started_s) / options.network_rounds
    spread_links = spread(cluster, _averaged(links), session.devices)
    reporter.phase("Measuring the runtime: a few steps of a small model")
    computes = (
        f"emulated at {cluster.emulated_speed:g} of the kinds' speed" if backend == "emulated" else f"real {backend}"
        for backend in sorted({device.backend for device in cluster.devices})
    )
    return Profile(
        cluster=cluster,
        model=model,
        graph=graph,
        dtype=options.dtype,
        timings=compute.timings,
        links=spread_links,
        runtime=rehearse(session, spread_links),
        scores=compute.scores,
        provenance=Provenance(
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            spantrain_version=VERSION,
            torch_version=torch.__version__,
            machine=f"{platform.node()} {platform.machine()} {platform.system()} {platform.release()}",
            method=f"compute: {', '.join(computes)}; links: {session.network}",
            compute_s=compute_s,
            network_s=network_s,
        ),
    )


def _compute(
    session: Session, model: ModelSpec, graph: UnitGraph, options: ProfileOptions, reporter: Reporter
) -> _Compute:
    """Measure units once for each kind, scores on every device; a cached result of the same question is as good."""
    cache = cache_folder() / f"compute-{_question(session, model, graph, options)}.json"
    found = cached(cache, _Compute, _COMPUTE, reporter.note) if options.use_cache else None
    if found is not None:
        reporter.note(f"Compute times come from the cache ({cache}); --fresh measures again")
        return found
    kinds: dict[str, str] = {}
    for name in session.devices:
        kinds.setdefault(session.cluster.device_by_name[name].kind, name)
    orders = {
        name: ComputeOrder(
            cluster=session.cluster,
            model=model,
            graph=graph,
            dtype=options.dtype,
            sizes=options.sizes if name in kinds.values() else (),
        )
        for name in session.devices
    }
    reporter.phase(f"Measuring compute: {len(kinds)} kinds, {len(session.devices)} devices")
    results = session.coordinator.perform(
        orders, on_progress=lambda device, done, total, text: reporter.progress(done, total, f"{device}: {text}")
    )
    parsed = [results[name] for name in session.devices]
    ratio = max(result.real_compute_ratio for result in parsed)
    if session.cluster.emulated and ratio > MAX_REAL_COMPUTE:
        reporter.note(too_fast(session.cluster, ratio))
    compute = _Compute(
        timings=tuple(timing for result in parsed for timing in result.timings),
        scores=tuple(result.score for result in parsed),
    )
    keep_cached(compute, _COMPUTE, cache, reporter.note)
    return compute


def _question(session: Session, model: ModelSpec, graph: UnitGraph, options: ProfileOptions) -> str:
    """Return a digest of everything that the compute times depend on."""
    cluster = session.cluster
    parts = {
        "kinds": [to_json(kind) for kind in cluster.kinds],
        "devices": [to_json(cluster.device_by_name[name]) for name in session.devices],
        "speed": cluster.emulated_speed,
        "model": to_json(model),
        "graph": to_json(graph),
        "dtype": options.dtype,
        "sizes": options.sizes,
        "versions": [VERSION, torch.__version__, platform.node(), platform.processor()],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def _network_round(session: Session, reporter: Reporter) -> list[LinkMeasurement]:
    # Where this machine plays all hosts itself, a pair keeps the threads of two programs and the router busy; if they
    # wait for a processor, the processors are measured, not the links.
    carried = max(1, len(os.sched_getaffinity(0)) // _PROCESSORS_OF_A_PAIR)
    rounds = pair_rounds(session.cluster, session.devices, max_at_once=carried if session.workers else None)
    all_pairs = [pair for pairs in rounds for pair in pairs]
    names: dict[str, set[str]] = {}
    for one, other in all_pairs:
        names.setdefault(one, {one}).add(other)
        names.setdefault(other, {other}).add(one)
    peers_of = {name: session.coordinator.peers(sorted(peers)) for name, peers in names.items()}
    session.coordinator.perform(
        {name: ConnectOrder(generation=_PROBE_GENERATION, peers=peers) for name, peers in peers_of.items()}
    )
    links: list[LinkMeasurement] = []
    done = 0
    for pairs in rounds:
        links.extend(_measure_pairs(session, pairs, peers_of, links))
        done += len(pairs)
        reporter.progress(done, len(all_pairs), f"{pairs[0][0]} - {pairs[0][1]}")
    # Once more those with a direction that came out much slower than others like it.
    doubts = doubtful(session.cluster, links)
    found = {(link.source, link.target): link for link in links}
    for pair in all_pairs:
        if doubts & {pair, pair[::-1]}:
            for link in _measure_pairs(session, [pair], peers_of, links):
                found[link.source, link.target] = better(found[link.source, link.target], link)
    return list(found.values())


def _measure_pairs(
    session: Session,
    pairs: Sequence[tuple[str, str]],
    peers_of: Mapping[str, tuple[PeerAddress, ...]],
    known: Sequence[LinkMeasurement],
) -> list[LinkMeasurement]:
    """Measure pairs that do not disturb each other at the same time; `known` are the links measured before."""
    orders: dict[str, LinkOrder | EchoOrder] = {}
    for source, target in pairs:
        orders[target] = EchoOrder(generation=_PROBE_GENERATION, peers=peers_of[target])
        orders[source] = LinkOrder(
            generation=_PROBE_GENERATION,
            peers=peers_of[source],
            target=target,
            max_payload_bytes=payload_cap_bytes(session.cluster, source, target),
            rounds=1,
            expected_bytes_per_s=expected_rates(session.cluster, known, (source, target)),
        )
    target_of = dict(pairs)
    try:
        results = session.coordinator.perform(orders, until=tuple(target_of))
    except OrderAbandonedError as abandoned:
        raise unmeasured(abandoned.device, target_of[abandoned.device], abandoned.why) from abandoned
    return [link for result in results.values() if isinstance(result, LinkResult) for link in result.links]


def unmeasured(source: str, target: str, why: str) -> PeerLostError:
    """Return the error of a device that gave up on another, which may not even have noticed."""
    return PeerLostError(
        f"the link between {source} and {target} could not be measured: {why}; is it "
        "faster than some 100 kbit/s? Where it is not: plan by data sheets (spantrain plan --preset|--cluster)"
    )


def _averaged(links: Sequence[LinkMeasurement]) -> tuple[LinkMeasurement, ...]:
    """Average the rounds (SpanTrain 3.2.1)."""
    by_pair: dict[tuple[str, str], list[LinkMeasurement]] = {}
    for link in links:
        by_pair.setdefault((link.source, link.target), []).append(link)
    return tuple(
        replace(
            found[0],
            latency_s=sum(link.latency_s for link in found) / len(found),
            bandwidth_bytes_per_s=sum(link.bandwidth_bytes_per_s for link in found) / len(found),
            rounds=len(found) * found[0].rounds,
            curve=None,
        )
        for found in by_pair.values()
    )
