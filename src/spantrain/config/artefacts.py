"""profile.json and plan.json: versioned, readable, written atomically, read strictly (docs/artefacts.md); graphs.

References inside of them that a type cannot check are checked here: each problem is one line.

Graphs of the catalog's models ship with the program, so that planning needs neither torch nor its seconds:
`scripts/make_graphs.py` makes the files in `graphs/`, one for each model, in float32.
"""

import hashlib
import os
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import fields
from importlib import resources
from itertools import combinations, permutations
from pathlib import Path
from typing import TypeVar

from spantrain.config.files.json_codec import from_json, render_json, to_json
from spantrain.config.files.parsing import parse_json
from spantrain.config.files.problems import Problems, shortened
from spantrain.config.files.text_files import is_file, read_bytes, sha256_of, text_of, write_atomically
from spantrain.core.cluster import Cluster
from spantrain.core.plan import Plan
from spantrain.core.planned.report import PlanReport, ProfileReference
from spantrain.core.profile import Profile
from spantrain.core.records import Record
from spantrain.core.units import ModelSpec, UnitGraph
from spantrain.errors import ConfigError, PlanError, ProfileError, UsageError

T = TypeVar("T")
_MAX_SAMPLES = 2**24
_MAX_PIECES = 2**20
Note = Callable[[str, str], None]
"""Takes the path of a field and what is wrong with it."""
PROFILE_FORMAT = "spantrain-profile"
PLAN_FORMAT = "spantrain-plan"
CHECKPOINT_FORMAT = "spantrain-checkpoint"
RUN_FORMAT = "spantrain-run"
VIEW_FORMAT = "spantrain-view"
_VERSIONS = {CHECKPOINT_FORMAT: 4, RUN_FORMAT: 2}
"""Versions of formats that have changed; all others have 1."""
_PLAN_AGAIN = "plan again with `spantrain plan`"
_MAKE = {
    PROFILE_FORMAT: "make a profile with `spantrain profile`",
    PLAN_FORMAT: "make a plan with `spantrain plan`",
    VIEW_FORMAT: "train again with `spantrain train`, which writes it",
    CHECKPOINT_FORMAT: "go on from an older checkpoint: write its name into `latest` beside its folder",
}


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile.

    Raises:
        ProfileError: it cannot be written there.
    """
    write_artefact(profile, PROFILE_FORMAT, path, ProfileError)


def read_profile(path: Path) -> Profile:
    """Read a profile.

    Raises:
        ProfileError: it is missing, something else, of another version, or wrong; all that is wrong is told.
    """
    return _profile_in(read_bytes(path, remedy=_remedy(PROFILE_FORMAT), error=ProfileError), path)


def _profile_in(content: bytes, path: Path) -> Profile:
    profile = artefact_in(content, Profile, PROFILE_FORMAT, path, ProfileError)
    problems = Problems(str(path))
    check_profile(profile, problems.add)
    problems.check(ProfileError)
    return profile


class _PlanFile(PlanReport, Plan):
    """All that a plan.json holds."""


def write_plan(plan: Plan, path: Path, report: PlanReport | None = None) -> None:
    """Write a plan, with what is said of it.

    Raises:
        PlanError: it cannot be written there.
    """
    parts = {entry.name: getattr(part, entry.name) for part in (plan, report or PlanReport()) for entry in fields(part)}
    write_artefact(_PlanFile(**parts), PLAN_FORMAT, path, PlanError)


def read_plan(path: Path) -> Plan:
    """Read a plan.

    Raises:
        PlanError: it is missing, something else, of another version, or wrong; all that is wrong is told.
    """
    return _part_of_file(Plan, path)


def read_plan_report(path: Path) -> PlanReport:
    """Read what is said of the plan in a file, which may be nothing.

    Raises:
        PlanError: as `read_plan`.
    """
    return _part_of_file(PlanReport, path)


def _part_of_file(kind: type[T], path: Path) -> T:
    found = read_artefact(_PlanFile, PLAN_FORMAT, path, PlanError)
    problems = Problems(str(path))
    check_plan(found, problems.add)
    if found.prediction is not None:
        check_known(found.prediction.peak_bytes, found.cluster.device_by_name, "prediction.peak_bytes", problems.add)
    problems.check(PlanError)
    return kind(**{entry.name: getattr(found, entry.name) for entry in fields(kind)})  # type: ignore[arg-type]


def reference_to_profile(profile_path: Path, plan_path: Path) -> ProfileReference:
    """Return how a plan at `plan_path` names the profile that it was made from, which must be there already."""
    relative = os.path.relpath(profile_path.resolve(), plan_path.parent.resolve())
    return ProfileReference(path=Path(relative).as_posix(), sha256=sha256_of(profile_path))


def profile_of_plan(plan: Plan, plan_path: Path) -> Profile:
    """Return the profile that a plan was made from.

    Raises:
        ProfileError: the plan names none, or it is missing, or it has changed since the plan was made.
    """
    return profile_at(profile_path_of(plan, plan_path), plan, str(plan_path))


def profile_path_of(plan: Plan, plan_path: Path) -> Path:
    """Return where the profile lies that a plan at `plan_path` was made from.

    Raises:
        ProfileError: the plan names none.
    """
    if plan.profile is None:
        raise ProfileError(f"{plan_path}: names no profile; {_PLAN_AGAIN}")
    return plan_path.parent / plan.profile.path


def profile_at(path: Path, plan: Plan, source: str) -> Profile:
    """Return the profile at a path, which must be the one that a plan was made from; `source` names the plan in errors.

    Raises:
        ProfileError: the plan names none, or it is missing, or it has changed since the plan was made.
    """
    if plan.profile is None:
        raise ProfileError(f"{source}: names no profile; {_PLAN_AGAIN}")
    if not is_file(path):
        raise ProfileError(
            f"{path}: the profile that {source} was made from is not there; put it back, or {_PLAN_AGAIN}"
        )
    content = read_bytes(path, remedy=_PLAN_AGAIN, error=ProfileError)
    digest = hashlib.sha256(content).hexdigest()
    if digest != plan.profile.sha256:
        raise ProfileError(
            f"{path}: is not the profile that {source} was made from (SHA-256 {digest[:12]}, "
            f"the plan has {shortened(plan.profile.sha256, 12)}); put the old one back, or {_PLAN_AGAIN}"
        )
    return _profile_in(content, path)


def write_artefact(value: object, form: str, path: Path, error: type[UsageError] = ConfigError) -> None:
    """Write a dataclass as an artefact of the format `form`, atomically.

    Raises:
        UsageError: (the class given as `error`) it cannot be written there.
        ValueError: it holds what JSON cannot say, such as an infinite number.
    """
    write_atomically(path, artefact_text(value, form), error=error)


def artefact_text(value: object, form: str) -> str:
    """Return the text of a dataclass as an artefact of the format `form`.

    Raises:
        ValueError: it holds what JSON cannot say, such as an infinite number.
    """
    return render_json({"format": form, "version": _VERSIONS.get(form, 1), **to_json(value)}) + "\n"


def read_artefact(cls: type[T], form: str, path: Path, error: type[UsageError] = ConfigError) -> T:
    """Read a dataclass that `write_artefact` wrote in the format `form`.

    Raises:
        UsageError: (the class given as `error`) it is missing, something else, or wrong; all that is wrong is told.
    """
    return artefact_in(read_bytes(path, remedy=_remedy(form), error=error), cls, form, path, error)


def artefact_in(content: bytes, cls: type[T], form: str, path: Path, error: type[UsageError] = ConfigError) -> T:
    """Return the dataclass in the content of an artefact of the format `form`; `path` is its name in errors.

    Raises:
        UsageError: (the class given as `error`) it is something else, or wrong; all that is wrong is told.
    """
    remedy = _remedy(form)
    text = text_of(content, path, remedy=remedy, error=error)
    data = parse_json(text, str(path), error=error, remedy=remedy)
    if not isinstance(data, dict) or "format" not in data:
        raise error(f'{path}: is not a {form} file (no "format" in it); {remedy}')
    if data["format"] != form:
        raise error(f"{path}: is a {shortened(str(data['format']))} file, a {form} is needed; {remedy}")
    version, ours = data.get("version"), _VERSIONS.get(form, 1)
    if type(version) is not int or version != ours:
        raise error(f"{path}: has format version {shortened(repr(version))}, this program reads {ours}; {remedy}")
    fields_ = {key: value for key, value in data.items() if key not in ("format", "version")}
    return from_json(cls, fields_, str(path), error=error)


def _remedy(form: str) -> str:
    return _MAKE.get(form, "make it anew, or name the right file")


class ShippedGraph(Record):
    """A model's units as a certain version of the libraries builds them."""

    model: ModelSpec
    graph: UnitGraph
    made_with: str
    """Versions of torch and transformers."""


def shipped_graph(spec: ModelSpec, dtype: str = "float32") -> UnitGraph | None:
    """Return the graph of a model, or None if none ships for exactly this one (data set aside)."""
    file = resources.files("spantrain.config") / "graphs" / f"{spec.name}.json"
    if dtype != "float32" or spec.compiled or not file.is_file():
        return None
    where = f"graphs/{spec.name}.json"
    found = from_json(ShippedGraph, parse_json(file.read_text(encoding="utf-8"), where), where)
    return found.graph if _shape(found.model) == _shape(spec) else None


def _shape(spec: ModelSpec) -> object:
    """Return what a graph depends on, in the form that it has in a file."""
    plain = to_json(spec)
    return [plain[name] for name in ("family", "config", "sequence_length", "objective")]


def missing_links(sites: Sequence[str], linked: Collection[tuple[str, str]]) -> str:
    """Return what to say of ordered pairs of sites that have no link; empty if all have one.

    >>> missing_links(["a", "b"], [("a", "b"), ("b", "a")])
    ''
    >>> missing_links(["a", "b"], [("a", "b")])
    'sites are disconnected: no link b -> a; add it, or a default with `between: all`'
    """
    named = [site for site in sites if site]
    missing = {pair for pair in permutations(named, 2) if pair not in linked}
    both = [pair for pair in combinations(named, 2) if pair in missing and pair[::-1] in missing]
    one = [pair for pair in permutations(named, 2) if pair in missing and pair[::-1] not in missing]
    told = [f"{a} <-> {b}" for a, b in both] + [f"{a} -> {b}" for a, b in one]
    if not told:
        return ""
    added = "it" if len(told) == 1 else "them"
    return f"sites are disconnected: no link {', '.join(told)}; add {added}, or a default with `between: all`"


def check_cluster(cluster: Cluster, note: Note) -> None:
    """Note every reference inside a cluster that leads nowhere."""
    devices_of = {host.name: frozenset(host.devices) for host in cluster.hosts}
    hosts_of = {site.name: frozenset(site.hosts) for site in cluster.sites}
    for device in cluster.devices:
        path = f"cluster.devices.{device.name}"
        if device.kind not in cluster.kind_by_name:
            note(path, f"kind {device.kind!r} is not among the cluster's kinds")
        host = cluster.host_by_name.get(device.host)
        if host is None or device.name not in devices_of[host.name] or host.site != device.site:
            note(
                path, f"does not agree with the cluster's hosts and sites (host {device.host!r}, site {device.site!r})"
            )
        if device.memory_bytes <= 0:
            note(path, f"memory_bytes must be positive, got {device.memory_bytes}")
    for host in cluster.hosts:
        if host.name not in hosts_of.get(host.site, ()):
            note(f"cluster.hosts.{host.name}", f"does not agree with the cluster's sites (site {host.site!r})")
        check_known(host.devices, cluster.device_by_name, f"cluster.hosts.{host.name}.devices", note)
    for place in cluster.sites:
        check_known(place.hosts, cluster.host_by_name, f"cluster.sites.{place.name}.hosts", note)
    linked = {(link.source, link.target) for link in cluster.links}
    missing = "" if cluster.default_link else missing_links([site.name for site in cluster.sites], linked)
    if missing:
        note("cluster.links", missing)


def check_profile(profile: Profile, note: Note) -> None:
    """Note every reference inside a profile that leads nowhere."""
    check_cluster(profile.cluster, note)
    devices, kinds = profile.cluster.device_by_name, profile.cluster.kind_by_name
    for index, link in enumerate(profile.links):
        check_known((link.source, link.target), devices, f"links[{index}]", note)
    check_known([score.device for score in profile.scores], devices, "scores", note)
    check_known([timing.kind for timing in profile.timings], kinds, "timings", note)
    seen: set[tuple[object, ...]] = set()
    for index, timing in enumerate(profile.timings):
        key = (timing.unit_class, timing.kind, timing.dtype, timing.tp_degree, timing.samples)
        if key in seen:
            note(f"timings[{index}]", f"is a second one of {timing.unit_class} on {timing.kind} for as many samples")
        seen.add(key)


def check_plan(plan: Plan, note: Note) -> None:
    """Note every reference inside a plan that leads nowhere; Plan itself has checked its stages."""
    check_cluster(plan.cluster, note)
    if plan.global_batch > _MAX_SAMPLES:
        note("global_batch", f"must be at most {_MAX_SAMPLES} samples, got {plan.global_batch}")
    pieces = sum(len(stage.replicas) * len(stage.micro_batches) for stage in plan.stages)
    if pieces > _MAX_PIECES:
        note("stages", f"have {pieces} micro-batches of replicas; at most {_MAX_PIECES} are simulated and trained")
    for index, stage in enumerate(plan.stages):
        if not stage.replicas:
            note(f"stages[{index}].replicas", "a stage needs at least one replica")


def check_known(names: Iterable[str], known: Container[str], path: str, note: Note) -> None:
    """Note devices, hosts or kinds that a cluster does not have."""
    unknown = sorted({name for name in names if name not in known})
    if unknown:
        note(path, f"the cluster does not have {', '.join(unknown)}")
