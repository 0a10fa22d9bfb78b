"""A folder of measured runs and profiles (the form of the Sailor artifact's data) -> Reference."""

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from spantrain.config.files.text_files import is_file
from spantrain.errors import ConfigError
from spantrain_studies.reference.json_fields import JsonField, parse_file
from spantrain_studies.reference.types import (
    LayerSizes,
    LayerTimes,
    LinkCurve,
    ModelShape,
    Reference,
    ReferenceCase,
    ReferenceModel,
    ReferencePrices,
    ReferenceReplica,
    ReferenceStage,
)

MEASURED_FILE = "measured.json"
_MAX_COUNT = 2**20
_MAX_MICRO_BATCHES = 4096
_REMEDY = "a folder to validate against holds measured.json, profiles_MODEL.json, network.json and prices.json"
_TABLES = ("simulator", "planner")
"""Tables of times, the preferred one first."""

T = TypeVar("T")


def read_reference(folder: Path) -> Reference:
    """Read all files of a folder; unknown keys are left alone, since such files describe themselves.

    Raises:
        ConfigError: a file is missing, is no JSON, or has bad fields; a run names layers, kinds, degrees or models
            that were not profiled.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; {_REMEDY}")
    cases = _read(folder / MEASURED_FILE, _cases)
    links, inside = _read(folder / "network.json", _network)
    hosts, prices = _read(folder / "prices.json", lambda root: (_hosts(root), _prices(root)))
    models = {name: _read_model(folder, name) for name in sorted({case.model for case in cases})}
    # Other models show what layers cost that one model's profile lacks.
    for path in sorted(folder.glob("profiles_*.json")):
        name = path.stem.removeprefix("profiles_")
        if name not in models:
            models[name] = _read_model(folder, name)
    reference = Reference(
        cases=cases,
        models=models,
        links=links,
        inside=inside,
        devices_per_host={kind: devices for kind, (devices, _) in hosts.items()},
        memory_bytes={kind: size for kind, (_, size) in hosts.items()},
        prices=prices,
    )
    _check_cases(reference, folder / MEASURED_FILE)
    return reference


def _read(path: Path, read: Callable[[JsonField], T]) -> T:
    root = parse_file(path, remedy=_REMEDY)
    found = read(root)
    root.problems.check()
    return found


def _read_model(folder: Path, name: str) -> ReferenceModel:
    path = folder / f"profiles_{name}.json"
    if "/" in name or not is_file(path):
        present = ", ".join(sorted(entry.name for entry in folder.glob("profiles_*.json"))) or "no profile"
        raise ConfigError(
            f"{path}: there is no such file, but runs in {MEASURED_FILE} name the model {name!r}; there is {present}"
        )
    return _read(path, lambda root: _model(name, root))


def _model(name: str, root: JsonField) -> ReferenceModel:
    roles = tuple(item.text() for item in root.child("layer_roles").items())
    config = root.child("training_config_in_repository")
    return ReferenceModel(
        name=name,
        roles=roles,
        shape=None if config.value is None else _shape(config),
        sizes_by_tp={
            _key(tp): LayerSizes(
                parameters=sizes.child("params_floats").numbers(len(roles)),
                output_floats=sizes.child("act_output_floats").numbers(len(roles)),
                activation_floats=sizes.child("act_mem_floats").numbers(len(roles)),
            )
            for tp, sizes in _keyed(root.child("memory_by_tp"))
        },
        times={
            (kind, _key(samples), _key(tp)): LayerTimes(
                forward_s=times.child("forward_s").numbers(len(roles)),
                backward_s=times.child("backward_s").numbers(len(roles)),
                update_s=times.child("update_s").numbers(len(roles)),
            )
            for kind, tables in root.child("timing_by_gpu").entries().items()
            for samples, by_tp in _keyed(_preferred(tables))
            for tp, times in _keyed(by_tp)
        },
    )


def _shape(config: JsonField) -> ModelShape:
    return ModelShape(
        hidden=config.child("hidden_size").count(most=_MAX_COUNT),
        sequence_length=config.child("sequence_length").count(most=_MAX_COUNT),
        positions=config.child("max_position_embeddings").count(least=0, most=_MAX_COUNT),
    )


def _preferred(tables: JsonField) -> JsonField:
    found = tables.entries()
    for name in _TABLES:
        if name in found:
            return found[name]
    tables.problem(f"needs one of the tables {', '.join(_TABLES)}")
    return JsonField(value={}, path=tables.path, problems=tables.problems)


def _keyed(field: JsonField) -> Iterable[tuple[str, JsonField]]:
    """Return the entries whose key is a whole number; others are problems."""
    for key, value in field.entries().items():
        if key.isascii() and key.isdigit() and len(key) <= 9 and int(key) > 0:
            yield key, value
        else:
            value.problem(f"the key {key!r} must be a whole number, a micro-batch or a tensor-parallel degree")


def _key(text: str) -> int:
    return int(text)


def _network(
    root: JsonField,
) -> tuple[dict[tuple[str, str, int, str, str, int], LinkCurve], dict[tuple[str, int], LinkCurve]]:
    links = {
        (
            row.child("send_zone").text(),
            row.child("send_gpu").text(),
            row.child("send_gpu_count").count(most=_MAX_COUNT),
            row.child("recv_zone").text(),
            row.child("recv_gpu").text(),
            row.child("recv_gpu_count").count(most=_MAX_COUNT),
        ): _curve(row)
        for row in root.child("inter_node").items()
    }
    inside = {
        (row.child("gpu").text(), row.child("gpu_count").count(most=_MAX_COUNT)): _curve(row)
        for row in root.child("intra_node").items()
    }
    return links, inside


def _curve(row: JsonField) -> LinkCurve:
    coefficients = row.child("coeffs")
    found = tuple(item.any_number() for item in coefficients.items())
    if coefficients.value == []:
        coefficients.problem("must hold at least one number")
    return LinkCurve(
        coefficients=found, max_bandwidth_bytes_per_s=row.child("max_bandwidth_bytes_per_s").number(positive=True)
    )


def _hosts(root: JsonField) -> dict[str, tuple[int, int]]:
    """Return the devices of a host and the bytes of a device, by kind."""
    return {
        kind: (row.child("gpus_per_node").count(most=_MAX_COUNT), row.child("mem_per_gpu").count())
        for kind, row in root.child("cluster").entries().items()
        if isinstance(row.value, dict)
    }


def _prices(root: JsonField) -> ReferencePrices | None:
    """Return the prices, one for each kind (zones that have one have the same), if the folder has any."""
    if not isinstance(root.value, dict) or "gpu_usd_per_hour_simulator" not in root.value:
        return None
    by_kind = root.child("gpu_usd_per_hour_simulator").entries()
    memory = root.child("memory_model")
    base = memory.child("constant_bytes_when_planning")
    return ReferencePrices(
        usd_per_hour={
            kind: max((price.number() for price in zones.entries().values()), default=0.0)
            for kind, zones in by_kind.items()
        },
        usd_per_byte={
            (source, target): price.number() / 1e9
            for source, row in root.child("transfer_usd_per_gb").entries().items()
            for target, price in row.entries().items()
        },
        bytes_per_parameter=memory.child("bytes_per_parameter").child("adam").number(),
        base_bytes=base.child("tp1").number(),
        base_bytes_of_group=base.child("tp>1").number(),
    )


def _cases(root: JsonField) -> tuple[ReferenceCase, ...]:
    rows = root.child("cases")
    cases = tuple(_case(row) for row in rows.items())
    if rows.value == []:
        rows.problem("must hold at least one run")
    names = [case.id for case in cases]
    for name in sorted(name for name, count in Counter(names).items() if count > 1 and name != "?"):
        rows.problem(f"two runs have the id {name!r}")
    return cases


def _case(row: JsonField) -> ReferenceCase:
    stages = tuple(_stage(stage) for stage in row.child("stages").items())
    case = ReferenceCase(
        id=row.child("id").text(),
        set_name=row.child("set").text(),
        model=row.child("model").text(),
        nodes=row.child("nodes").count(most=_MAX_COUNT),
        global_batch=row.child("global_batch").count(most=_MAX_COUNT),
        micro_batch=row.child("microbatch").count(most=_MAX_COUNT),
        stages=stages,
        step_s=row.child("measured_iteration_s").number(positive=True),
        gradient_sum_s=row.child("measured_gradient_reduction_s").number(),
        peak_bytes=row.child("measured_peak_memory_bytes").number(positive=True),
        flags=tuple(flag.text() for flag in row.child("flags").items()),
    )
    if not stages or any(not stage.replicas for stage in stages):
        row.problem("every run needs stages with replicas")
        return case
    _check_shape(row, case)
    return case


def _check_shape(row: JsonField, case: ReferenceCase) -> None:
    expected = 0
    for index, stage in enumerate(case.stages):
        if stage.layers.start != expected:
            row.problem(f"stage {index} begins with layer {stage.layers.start}, the stage before ends at {expected}")
        expected = stage.layers.stop
    if any(len(stage.replicas) != case.dp_degree for stage in case.stages):
        row.problem("all stages must have the same number of replicas")
    each = case.micro_batch * case.dp_degree
    if case.global_batch // each > _MAX_MICRO_BATCHES:
        row.problem(f"has {case.global_batch // each} micro-batches; at most {_MAX_MICRO_BATCHES} are simulated")
    if case.global_batch % each:
        row.problem(
            f"the global batch {case.global_batch} is no multiple of micro-batch times replicas "
            f"({case.micro_batch} x {case.dp_degree})"
        )


def _stage(field: JsonField) -> ReferenceStage:
    ends = [item.count(least=0, most=_MAX_COUNT) for item in field.child("layers").items()]
    if len(ends) != 2 or ends[0] > ends[1]:
        field.problem(f"layers must be [first, last], got {ends}")
        ends = [0, 0]
    return ReferenceStage(
        layers=range(ends[0], ends[1] + 1),
        replicas=tuple(
            ReferenceReplica(
                kind=replica.child("gpu").text(),
                zone=replica.child("zone").text(),
                tp_degree=replica.child("tp").count(most=_MAX_COUNT),
            )
            for replica in field.child("replicas").items()
        ),
    )


def _check_cases(reference: Reference, path: Path) -> None:
    """Check that what the runs use was profiled; the first thing that was not is told.

    Raises:
        ConfigError: it was not.
    """
    for case in reference.cases:
        model = reference.models[case.model]
        last = case.stages[-1].layers.stop - 1
        if last >= model.num_layers:
            raise ConfigError(
                f"{path}: {case.id}: names layer {last}, but {case.model} was profiled with {model.num_layers} layers "
                f"(0 to {model.num_layers - 1})"
            )
        for replica in {replica for stage in case.stages for replica in stage.replicas}:
            _check_replica(reference, model, case, replica, path)


def _check_replica(
    reference: Reference, model: ReferenceModel, case: ReferenceCase, replica: ReferenceReplica, path: Path
) -> None:
    where = f"{path}: {case.id}: {replica.kind} at tensor-parallel degree {replica.tp_degree}"
    if replica.kind not in reference.devices_per_host:
        known = ", ".join(sorted(reference.devices_per_host))
        raise ConfigError(f"{where}: prices.json says nothing of this kind under 'cluster'; it has {known}")
    if replica.tp_degree not in model.sizes_by_tp:
        raise ConfigError(f"{where}: profiles_{model.name}.json has no sizes at this degree under 'memory_by_tp'")
    if not any(kind == replica.kind and tp == replica.tp_degree for kind, _, tp in model.times):
        raise ConfigError(f"{where}: profiles_{model.name}.json has no times for this under 'timing_by_gpu'")
