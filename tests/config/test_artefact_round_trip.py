"""What is written is read back equal, and equal values give equal files."""

import json
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.config.artefacts import read_plan, read_plan_report, read_profile, write_plan, write_profile
from spantrain.config.cluster_file import load_preset
from spantrain.config.files.json_codec import from_json, to_json
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.planned.report import Alternative, PlanReport, Prediction, ProfileReference
from spantrain.core.profile import DeviceScore, LinkMeasurement, Profile, Provenance, UnitTiming
from spantrain.core.shares import MemberBytes, StateSharding, TensorPieces
from spantrain.core.span import equal_spans
from spantrain.core.units import ModelSpec, TensorSpec, Unit, UnitGraph
from spantrain.formats.registry import WireFormat

LAPTOP = load_preset("laptop")
DEVICES = [device.name for device in LAPTOP.devices]
seconds = st.just(0.0) | st.floats(1e-60, 1e6, allow_nan=False)
positive = st.floats(1e-9, 1e15, allow_nan=False)
words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
integers = st.integers(1 - 2**63, 2**63 - 1)


def model_specs() -> st.SearchStrategy[ModelSpec]:
    value = st.one_of(
        integers, seconds | seconds.map(lambda value: -value), words, st.lists(integers, max_size=3).map(tuple)
    )
    return st.builds(
        ModelSpec,
        name=words,
        family=st.just("gpt2"),
        config=st.dictionaries(words, value, max_size=3),
        dataset=words,
        sequence_length=st.none() | st.integers(1, 512),
    )


def unit_graphs() -> st.SearchStrategy[UnitGraph]:
    tensors = st.builds(
        TensorSpec,
        name=words,
        shape_per_sample=st.lists(st.integers(1, 9), max_size=3).map(tuple),
        dtype=st.just("float32"),
        bytes_per_sample=st.integers(0, 2**46),
        requires_grad=st.booleans(),
    )
    pieces = st.builds(
        TensorPieces,
        pieces=st.integers(1, 2**20),
        parameter_bytes=st.integers(0, 2**40),
        work_share=st.just(0.0) | st.floats(1e-60, 1),
        shared=st.sampled_from([(), ("wte",)]),
    )
    members = st.builds(MemberBytes, whole_bytes=st.integers(0, 2**40), divided_bytes=st.integers(0, 2**40))
    units = st.builds(
        Unit,
        name=words,
        unit_class=words,
        parameter_bytes=st.integers(0, 2**40),
        forward_flop_per_sample=seconds,
        outputs=st.lists(tensors, max_size=2).map(tuple),
        activation_bytes_per_sample=st.integers(0, 2**40),
        shared=st.sampled_from([(), ("wte",)]),
        tensor_sums=st.integers(0, 2),
        tensor_pieces=st.lists(pieces, max_size=2).map(tuple),
        member_activation_bytes=st.none() | members,
        member_deferred_bytes=st.none() | members,
    )
    return st.builds(
        UnitGraph, units=st.lists(units, min_size=1, max_size=3).map(tuple), shared_bytes=st.just({"wte": 12})
    )


def profiles() -> st.SearchStrategy[Profile]:
    device = st.sampled_from(DEVICES)
    return st.builds(
        Profile,
        cluster=st.just(LAPTOP),
        model=model_specs(),
        graph=unit_graphs(),
        dtype=st.just("float32"),
        timings=_tuples(
            st.builds(
                UnitTiming,
                unit_class=words,
                kind=st.sampled_from([kind.name for kind in LAPTOP.kinds]),
                dtype=st.just("bfloat16"),
                samples=st.integers(1, 64),
                forward_s=seconds,
                backward_input_s=seconds,
                backward_weight_s=seconds,
            ),
            one_of_each=lambda timing: (timing.unit_class, timing.kind, timing.samples),
        ),
        links=_tuples(
            st.builds(
                LinkMeasurement,
                source=device,
                target=device,
                latency_s=seconds,
                bandwidth_bytes_per_s=positive,
                payload_bytes=st.integers(1, 2**40),
                rounds=st.integers(1, 9),
            )
        ),
        scores=_tuples(
            st.builds(DeviceScore, device=device, score=positive, task_s=st.dictionaries(words, seconds, max_size=2))
        ),
        provenance=st.builds(
            Provenance,
            created=words,
            spantrain_version=words,
            torch_version=words,
            machine=words,
            method=words,
            compute_s=seconds,
            network_s=seconds,
        ),
    )


@st.composite
def stage_chains(draw: st.DrawFn, batch: int) -> tuple[Stage, ...]:
    """Stages of one unit each, on all of the laptop's devices in any order."""
    order = draw(st.permutations(DEVICES))
    cuts = sorted(draw(st.sets(st.integers(1, len(order) - 1), max_size=3)))
    stages = []
    for index, (lo, hi) in enumerate(zip([0, *cuts], [*cuts, len(order)], strict=True)):
        replicas = tuple(
            Replica(devices=(name,), sample_share=draw(st.floats(0.1, 10)), in_flight_limit=batch)
            for name in order[lo:hi]
        )
        stages.append(
            Stage(
                first_unit=index,
                end_unit=index + 1,
                replicas=replicas,
                micro_batches=equal_spans(batch, draw(st.integers(1, batch))),
                state_sharding=draw(st.sampled_from(list(StateSharding)[: 5 if len(replicas) == 1 else 4])),
                wire_format=draw(st.sampled_from(WireFormat)) if hi < len(order) else WireFormat.NATIVE,
            )
        )
    return tuple(stages)


predictions = st.builds(
    Prediction,
    step_s=seconds,
    samples_per_s=positive,
    peak_bytes=st.dictionaries(st.sampled_from(DEVICES), st.integers(0, 2**50)),
    method=words,
)
alternatives = st.builds(
    Alternative,
    name=words,
    devices=st.lists(words, max_size=2).map(tuple),
    step_s=st.none() | seconds,
    samples_per_s=st.none() | positive,
    reason=words,
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    batch = draw(st.integers(1, 40))
    return Plan(
        cluster=LAPTOP,
        model=draw(model_specs()),
        global_batch=batch,
        dtype="float32",
        stages=draw(stage_chains(batch)),
        schedule="1f1b",
        generation=draw(st.integers(0, 5)),
        profile=draw(st.none() | st.builds(ProfileReference, path=words, sha256=words)),
    )


@st.composite
def reports(draw: st.DrawFn) -> PlanReport:
    return PlanReport(
        prediction=draw(st.none() | predictions), alternatives=draw(_tuples(alternatives)), reasons=draw(_tuples(words))
    )


def _tuples(entries, one_of_each=None):  # type: ignore[no-untyped-def]
    return st.lists(entries, max_size=3, unique_by=one_of_each).map(tuple)


@settings(deadline=None, max_examples=25)
@given(profiles())
def test_profile_round_trip(profile: Profile) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        write_profile(profile, path)
        assert read_profile(path) == profile
        first = path.read_bytes()
        write_profile(read_profile(path), path)
        assert path.read_bytes() == first


@settings(deadline=None, max_examples=25)
@given(plans(), reports())
def test_plan_round_trip(plan: Plan, report: PlanReport) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        write_plan(plan, path, report)
        assert read_plan(path) == plan
        assert read_plan_report(path) == report
        keys = list(json.loads(path.read_text(encoding="utf-8")))
        assert keys[:3] == ["format", "version", "cluster"]


@settings(deadline=None, max_examples=25)
@given(plans())
def test_json_is_plain(plan: Plan) -> None:
    text = json.dumps(to_json(plan), allow_nan=False)
    assert from_json(Plan, json.loads(text), "a plan") == plan
