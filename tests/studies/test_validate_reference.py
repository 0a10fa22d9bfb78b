"""`python -m spantrain_studies.reference` on a folder of measured runs: what it prints, and what it refuses."""

import json
from types import SimpleNamespace

import pytest

from spantrain_studies.reference.__main__ import main
from testing.reference import case, files, write

ALL = [0, 3]


@pytest.fixture
def validate(capfd):
    """Run the command with these words; return exit code and both outputs."""

    def run(*words):
        capfd.readouterr()
        code = main([str(word) for word in words])
        return SimpleNamespace(code=code, **dict(zip(("out", "err"), capfd.readouterr(), strict=True)))

    return run


def folder_of(tmp_path, change=None):
    content = files(case("one", [(ALL, ["fast"])]), case("pipe", [([0, 1], ["fast"]), ([2, 3], ["slow"])]))
    return write(tmp_path / "measured", content, change)


def test_json_ends_with_one_object_by_set(validate, tmp_path):
    ended = validate(folder_of(tmp_path), "--json")
    assert ended.code == 0, ended.err
    (found,) = json.loads(ended.out).items()
    assert found[0] == "made-up"
    assert {"cases", "time_mape", "time_max_ape", "memory_mape", "memory_max_ape"} <= set(found[1])
    assert [run["id"] for run in found[1]["cases"]] == ["one", "pipe"]
    for run in found[1]["cases"]:
        assert min(run[key] for key in ("predicted_s", "measured_s", "predicted_bytes", "measured_bytes")) > 0


def test_tables_say_flags_and_parts(validate, tmp_path):
    def flag(content):
        content["measured.json"]["cases"][1]["flags"] = ["suspect memory: too small by far"]

    ended = validate(folder_of(tmp_path, flag), "--explain")
    assert ended.code == 0, ended.err
    for words in (
        "constants as they ship",
        "pipe: left out: memory: suspect memory: too small by far",
        "gradient sum",
        "workspace",
    ):
        assert words in ended.out


def test_each_run_can_be_predicted_by_constants_that_never_saw_it(validate, tmp_path):
    """A folder in which nothing is exposed, but for one run: that one cannot tell the others' prediction."""
    plain = [(ALL, ["fast"])]

    def launches(content):
        table = content["profiles_toy.json"]["timing_by_gpu"]["fast"]["simulator"]
        table["4"] = {"1": {key: [1.0 * value for value in values] for key, values in table["2"]["1"].items()}}

    hidden = 4 * 0.5 * 7.6 + 0.017
    runs = [case(name, plain, measured_iteration_s=hidden) for name in "abcd"]
    odd = case("odd", plain, measured_iteration_s=1.5 * hidden)
    ended = validate(write(tmp_path / "measured", files(*runs, odd), launches), "--leave-one-out", "--json")
    assert ended.code == 0, ended.err
    cases = {run["id"]: run for run in json.loads(ended.out)["made-up"]["cases"]}
    assert cases["odd"]["predicted_s"] == pytest.approx(hidden, rel=0.01)
    assert cases["a"]["predicted_s"] > 1.02 * hidden


def set_in(*path):
    """Return a change of one value of the folder's files, by its path."""
    *above, last, value = path

    def change(content):
        for key in above:
            content = content[key]
        content[last] = value

    return change


def without(name):
    return lambda content: content.pop(name)


CASES = ("measured.json", "cases", 0)
TIMES = ("profiles_toy.json", "timing_by_gpu", "fast", "simulator", "2", "1")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("network.json"), ["network.json", "there is no such file", "prices.json"]),
        (without("prices.json"), ["prices.json", "there is no such file"]),
        (without("profiles_toy.json"), ["profiles_toy.json", "no such file", "'toy'"]),
        (set_in("measured.json", "{"), ["measured.json, line 1", "not valid JSON"]),
        (set_in("measured.json", "[]"), ["measured.json", "must hold a JSON object"]),
        (set_in("measured.json", "cases", []), ["cases", "at least one run"]),
        (set_in(*CASES, "microbatch", "2"), ["cases[0].microbatch", 'whole number from 1 to 1048576, got "2"']),
        (set_in(*CASES, "measured_iteration_s", 0), ["cases[0].measured_iteration_s", "above zero, got 0"]),
        (set_in(*CASES, "id", "pipe"), ["two runs have the id 'pipe'"]),
        (set_in(*CASES, "global_batch", 7), ["cases[0]", "7 is no multiple"]),
        (set_in(*CASES, "model", "gpt-9"), ["profiles_gpt-9.json", "profiles_toy.json"]),
        (set_in(*CASES, "stages", 0, "layers", [1, 3]), ["stage 0 begins with layer 1"]),
        (set_in(*CASES, "stages", 0, "layers", [0, 9]), ["one", "layer 9", "4 layers (0 to 3)"]),
        (set_in(*CASES, "stages", 0, "layers", [0]), ["layers must be [first, last]"]),
        (set_in(*CASES, "stages", 0, "replicas", []), ["stages with replicas"]),
        (set_in(*CASES, "stages", 0, "replicas", 0, "gpu", "abacus"), ["abacus", "fast, slow"]),
        (set_in(*CASES, "stages", 0, "replicas", 0, "tp", 3), ["tensor-parallel degree 3", "no sizes at this degree"]),
        (set_in(*TIMES, "forward_s", [1.0]), ["forward_s", "4 numbers, one for each layer, got 1"]),
        (set_in(*TIMES, "backward_s", 1, "long"), ["backward_s[1]", 'must be a number, got "long"']),
        (set_in(*TIMES, "backward_s", 1, -1), ["backward_s[1]", "zero or more, got -1"]),
        (set_in("network.json", "inter_node", []), ["no row under 'inter_node' from fast"]),
        (set_in("network.json", "inter_node", 0, "coeffs", []), ["coeffs", "at least one number"]),
    ],
)
def test_wrong_folders_are_refused_in_one_message(validate, tmp_path, change, says):
    ended = validate(folder_of(tmp_path, change))
    assert (ended.code, ended.out) == (2, ""), ended.err
    assert ended.err.startswith("Error: ")
    assert "Traceback" not in ended.err
    for words in says:
        assert words in ended.err


def test_a_folder_that_is_not_there_is_refused(validate, tmp_path):
    ended = validate(tmp_path / "nowhere")
    assert ended.code == 2
    assert "there is no such folder" in ended.err


def test_a_folder_with_nothing_to_compare_is_refused(validate, tmp_path):
    ended = validate(tmp_path)
    assert ended.code == 2
    assert "measured.json" in ended.err
