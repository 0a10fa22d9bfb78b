"""Artefacts that are missing, foreign, edited or unwritable are refused with one clear message."""

import json
import os
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import pytest

from spantrain.config.artefacts import (
    profile_of_plan,
    read_artefact,
    read_plan,
    read_profile,
    reference_to_profile,
    write_artefact,
    write_plan,
    write_profile,
)
from spantrain.config.files.json_codec import from_json, to_json
from spantrain.core.action import Action
from spantrain.core.plan import Plan
from spantrain.core.planned.report import PlanReport
from spantrain.core.profile import DeviceScore, Profile
from spantrain.core.span import Span
from spantrain.errors import ConfigError, PlanError, ProfileError, UsageError
from testing.effort import calls_of


def _edit(path: Path, change) -> None:  # type: ignore[no-untyped-def]
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")


def test_file_is_readable(plan: Plan, tmp_path: Path) -> None:
    write_plan(plan, tmp_path / "new" / "plan.json")
    lines = (tmp_path / "new" / "plan.json").read_text(encoding="utf-8").splitlines()
    assert lines[1:3] == ['  "format": "spantrain-plan",', '  "version": 1,']
    assert '      "micro_batches": ["[0:8]", "[8:16]"],' in lines
    assert max(map(len, lines)) <= 160


def test_every_field_problem_is_told_at_once(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(plan, path)

    def spoil(data) -> None:  # type: ignore[no-untyped-def]
        data["global_bacth"] = data.pop("global_batch")
        data["generation"] = True
        stage = data["stages"][0]
        stage["micro_batches"] = ["[8:0]", 5]
        stage["replicas"][0]["sample_share"] = 0
        data["cluster"]["links"][1]["loss_ratio"] = 2

    _edit(path, spoil)
    with pytest.raises(PlanError) as caught:
        read_plan(path)
    told = str(caught.value)
    assert caught.value.exit_code == 2
    for part in (
        f"{path}: 7 problems",
        "global_bacth: unknown key 'global_bacth'; did you mean 'global_batch'?",
        "global_batch: is missing; it must be a whole number",
        "generation: must be a whole number, got true",
        "stages[0].micro_batches[0]: a span needs 0 <= lo < hi, got [8:0]",
        'stages[0].micro_batches[1]: must be text like "[0:16]", got 5',
        "stages[0].replicas[0]: replica ('lab-0',): sample_share must be positive",
        "cluster.links[1]: link lab -> home: loss_ratio must be at least 0 and less than 1, got 2.0",
    ):
        assert part in told


def test_what_a_plan_itself_refuses_is_told(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    _edit(path, lambda data: data.update(global_batch=17))
    with pytest.raises(PlanError, match=r"plan.json: stage 0: micro-batches hold 16 samples, the global batch 17"):
        read_plan(path)


def test_a_profile_from_before_a_field_reads_as_its_default(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(profile, path)
    document = json.loads(path.read_text(encoding="utf-8"))
    for unit in document["graph"]["units"]:
        assert unit.pop("tensor_sums") == 0
    path.write_text(json.dumps(document), encoding="utf-8")
    assert read_profile(path) == profile


def test_references_that_lead_nowhere(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(profile, path)

    def spoil(data) -> None:  # type: ignore[no-untyped-def]
        data["links"][0]["target"] = "mars"
        data["timings"][0]["kind"] = "abacus"
        data["cluster"]["devices"][0]["host"] = "lab-1"
        del data["cluster"]["links"][0]

    _edit(path, spoil)
    with pytest.raises(ProfileError) as caught:
        read_profile(path)
    for part in ("links[0]: the cluster does not have mars", "does not have abacus", "lab-0", "no link lab -> office"):
        assert part in str(caught.value)


@pytest.mark.parametrize("what", ["devices", "hosts", "sites"])
@pytest.mark.parametrize("name", ["../../escaped", "a/b", "", ".", "x" * 64, "a\nb"])
def test_what_no_place_can_be_called_is_refused(what: str, name: str, plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    _edit(path, lambda data: data["cluster"][what][0].update(name=name))
    with pytest.raises(PlanError, match=rf"cluster\.{what}\[0\]: {what[:-1]} .* is no name; use up to 63 letters"):
        read_plan(path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "line 1: is not valid JSON"),
        ("[1]", "is not a spantrain-profile file"),
        ("{}", "is not a spantrain-profile file"),
        ('{"format": "spantrain-plan", "version": 1}', "is a spantrain-plan file, a spantrain-profile is needed"),
        ('{"format": "spantrain-profile", "version": 2}', "has format version 2, this program reads 1"),
        ('{"format": "spantrain-profile", "version": true}', "has format version True"),
        ('{"format": "spantrain-profile", "version": 1, "version": 1}', "keys given twice in one object: version"),
        ('{"format": "spantrain-profile", "version": NaN}', "NaN, which is no JSON number"),
        ("[" * 100_000, "nested too deeply"),
        ("\0", "is not valid JSON"),
    ],
)
def test_foreign_profile(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ProfileError) as caught:
        read_profile(path)
    assert str(caught.value).startswith(str(path))
    assert told in str(caught.value)


def test_missing_files(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="no such file; make a profile with `spantrain profile`"):
        read_profile(tmp_path / "profile.json")
    write_plan(plan, tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"is a folder, not a file; name the file in it: plan\.json"):
        read_plan(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match="not UTF-8"):
        read_plan(tmp_path / "bytes")


def test_profile_of_plan(plan: Plan, profile: Profile, tmp_path: Path) -> None:
    profile_path, plan_path = tmp_path / "p" / "profile.json", tmp_path / "q" / "plan.json"
    with pytest.raises(ProfileError, match="names no profile; plan again"):
        profile_of_plan(plan, plan_path)
    write_profile(profile, profile_path)
    whole = replace(plan, profile=reference_to_profile(profile_path, plan_path))
    assert whole.profile is not None
    assert whole.profile.path == "../p/profile.json"
    write_plan(whole, plan_path)
    assert profile_of_plan(read_plan(plan_path), plan_path) == profile
    write_profile(replace(profile, dtype="bfloat16"), profile_path)
    with pytest.raises(ProfileError, match=r"is not the profile that .* was made from"):
        profile_of_plan(whole, plan_path)
    profile_path.unlink()
    with pytest.raises(ProfileError, match=r"was made from is not there"):
        profile_of_plan(whole, plan_path)


def test_nothing_half_written(plan: Plan, profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    before = path.read_bytes()
    report = PlanReport(reasons=("\ud800",))  # a lone surrogate cannot be encoded: writing fails half-way
    with pytest.raises(UnicodeEncodeError):
        write_plan(plan, path, report)
    with pytest.raises(ValueError, match=r"provenance\.compute_s: inf cannot be written"):
        write_profile(replace(profile, provenance=replace(profile.provenance, compute_s=float("inf"))), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["plan.json"]


def test_other_artefacts(profile: Profile, tmp_path: Path) -> None:
    write_artefact(profile.scores[0], "spantrain-score", tmp_path / "score.json")
    assert read_artefact(DeviceScore, "spantrain-score", tmp_path / "score.json") == profile.scores[0]
    with pytest.raises(ConfigError, match=r"is a spantrain-score file, a spantrain-x is needed; make it anew"):
        read_artefact(DeviceScore, "spantrain-x", tmp_path / "score.json")


def test_unwritable_place(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(PlanError, match="cannot be written"):
        write_plan(plan, tmp_path / "file" / "plan.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(PlanError, match="cannot be written"):
        write_plan(plan, tmp_path / "folder")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_a_profile_twice_as_large_is_twice_the_work(many_links: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"

    def there_and_back(profile: Profile) -> None:
        write_profile(profile, path)
        assert read_profile(path) == profile

    links, timings = many_links.links, many_links.timings
    half = replace(many_links, links=links[: len(links) // 2], timings=timings[: len(timings) // 2])
    whole_calls = calls_of(lambda: there_and_back(many_links))
    assert whole_calls < 2.05 * calls_of(lambda: there_and_back(half))


class _Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class _Everything:
    colour: _Colour
    action: Action
    span: Span | None
    pair: tuple[int, str]
    value: float
    flags: dict[str, bool]
    mixed: int | float | str | tuple[int, ...] = 3


def test_generic_types() -> None:
    value = _Everything(
        colour=_Colour.BLUE,
        action=Action.parse("2F[0:16]"),
        span=None,
        pair=(1, "a"),
        value=1e-300,
        flags={"b": True, "a": False},
        mixed=(1, 2),
    )
    data = to_json(value)
    assert data["action"] == "2F[0:16]"
    assert list(data["flags"]) == ["a", "b"]
    assert from_json(_Everything, data, "x") == value
    for mixed in (1, 1.5, "text", True, ()):
        again = from_json(_Everything, {**data, "mixed": list(mixed) if mixed == () else mixed}, "x")
        assert again.mixed == mixed
        assert type(again.mixed) is type(mixed)


def test_generic_types_are_strict() -> None:
    data = {
        "colour": "green", "action": "2X[0:1]", "span": "0-4", "pair": [1], "value": 10**400, "flags": {"a": 1},
        "mixed": [1, "x"],
    }  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        from_json(_Everything, data, "x.json")
    for part in (
        "x.json: 7 problems",
        'colour: must be one of "red", "blue", got "green"',
        "action: not an action: '2X[0:1]'",
        "span: not a span: '0-4'",
        "pair: must be a list of 2, got 1",
        "value: must be a finite number, got 1000",
        "flags.a: must be true or false, got 1",
        'mixed[1]: must be a whole number, got "x"',
    ):
        assert part in str(caught.value)
    with pytest.raises(UsageError, match="x: must be an object, got a list"):
        from_json(_Everything, [], "x")
    with pytest.raises(ValueError, match="value: a set has no JSON form"):
        to_json({1, 2})
