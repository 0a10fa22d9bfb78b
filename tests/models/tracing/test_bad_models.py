"""Models that cannot be had or cut: one clear error, which says where."""

import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spantrain.errors import ConfigError
from spantrain.models.build import build_units, unit_names
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.graph import build_graph
from spantrain.models.sources import hf_configuration
from spantrain.models.tracing.factory import load_function
from testing.models import own_models

pytestmark = pytest.mark.models

SOURCE = Path(own_models.__file__)


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(SOURCE.read_text().splitlines(), start=1) if text in line)


def refusal(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        build_graph(resolve_model(f"{SOURCE}:{name}"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("sparse_words", r"words.weight has sparse gradients, which are not added up; say sparse=False"),
        (
            "written_over",
            r"its backward pass fails: RuntimeError: one of the variables needed for gradient .*modified by",
        ),
        (
            "wants_gradients",
            r"fails where no gradients are wanted: RuntimeError: element 0 .*own_models\.py:\d+ in forw",
        ),
    ],
)
def test_a_backward_pass_that_cannot_be_done_is_told_as_the_models(name, says):
    assert re.search(says, refusal(name))


def test_control_flow_by_data_names_the_line():
    said = refusal("decides")
    assert "control flow depends on data" in said
    assert f"own_models.py:{line_of('hidden.sum() > 0')}" in said


def test_random_numbers_of_another_library_are_found_by_numbers():
    said = refusal("noisy_elsewhere")
    assert "does not do the same every time" in said
    assert "draws random numbers otherwise than by functions of torch" in said


def test_an_example_batch_whose_loss_is_no_number_is_told_as_such(tmp_path):
    (tmp_path / "odd.py").write_text(
        "import torch\ndef build():\n    batch = torch.full((4, 8), float('nan')), torch.zeros(4, 8)\n"
        "    return torch.nn.Linear(8, 8), batch, torch.nn.functional.mse_loss\n"
    )
    with pytest.raises(ConfigError, match="the loss of its example batch is nan, from which nothing is learnt"):
        build_graph(resolve_model(f"{tmp_path / 'odd.py'}:build"))


def test_what_is_drawn_for_no_sample_is_refused():
    said = refusal("chosen_tokens")
    assert "`rand` in blocks.0 draws (3,) and (4,) for 2 and 3 samples" in said
    assert "--dropout off" in said


def test_a_factory_that_raises_is_named_with_its_place():
    said = refusal("raises")
    assert "the factory raised KeyError: 'no such width'" in said
    assert f"own_models.py:{line_of('no such width')} in raises" in said


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("fails", "fails on its example batch: RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        ("returns_a_module", "returned Feed; wanted (module, batch)"),
        ("batch_of_text", "the batch holds str, str; wanted tensors only"),
        ("unequal_samples", "(4, 8), (5, 8); the first dimension is the samples"),
        ("no_loss", "the model's output has no `loss`"),
        ("missing", "there is no function missing; functions there: batch_of_text, chain"),
        ("loss_raises", "the loss function raised RuntimeError: no loss today ("),
    ],
)
def test_what_a_factory_does_wrong_is_said(name, wanted):
    assert wanted in refusal(name)


def test_a_file_that_is_not_there_or_not_python(tmp_path):
    with pytest.raises(ConfigError, match="there is no file"):
        resolve_model(f"{tmp_path}/none.py:build")
    with pytest.raises(ConfigError, match="no module nowhere here"):
        resolve_model("nowhere:build")
    broken = tmp_path / "broken.py"
    broken.write_text("def build(:\n")
    with pytest.raises(ConfigError, match=r"importing it raised SyntaxError.*broken\.py"):
        unit_names(resolve_model(f"{broken}:build"))


def test_another_file_than_the_plan_was_made_with_is_refused(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(SOURCE.read_text())
    spec = resolve_model(f"{file}:chain")
    assert len(build_units(spec, seed=0)) == 3
    file.write_text(SOURCE.read_text() + "\n# changed\n")
    with pytest.raises(ConfigError, match="is not the file that this plan or profile was made with"):
        build_units(spec, seed=0)


def test_a_module_can_be_named_by_its_package():
    spec = resolve_model("testing.models.own_models:chain")
    assert (spec.family, spec.source, spec.dataset) == ("factory", "testing.models.own_models:chain", "example")
    assert unit_names(spec) == ("0", "3", "5")


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, "no model_type"),
        ({"model_type": "gpt2", "vocab_size": 100}, "vocab_size is 100, and text read as bytes needs 256"),
        ({"model_type": "bert", "vocab_size": 256}, "needs 257"),
        ({"model_type": "vit", "num_labels": 2}, "has 2 classes, and the handwritten digits need 10"),
        ({"model_type": "vit", "num_labels": 10}, "reads images of 3x224x224"),
        ({"model_type": "whisper"}, "architectures not given"),
        ({"model_type": "gpt2", "auto_map": {}}, "auto_map names code to be run"),
        ({"model_type": "llama", "text_config": {"auto_map": {}}}, "auto_map names code to be run"),
        (
            {"model_type": "llama", "_attn_implementation": "someone/kernel"},
            "_attn_implementation names code to be run",
        ),
        ({"model_type": "llama", "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; more than 4096"),
        ({"model_type": "llama", "hidden_size": 10**30}, "hidden_size is 1" + "0" * 30 + ", which is out of range"),
        ({"model_type": "llama", "architectures": [3]}, "architectures must be a list of names, got [3]"),
        ({"model_type": "llama", "max_position_embeddings": -5}, "has -5 positions; 2 to 16777216 are wanted"),
    ],
)
def test_a_configuration_that_will_not_do_is_named(fields, wanted, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=re.escape(wanted)):
        resolve_model(f"hf:{tmp_path}")


def test_a_configuration_that_is_not_there_is_named(tmp_path):
    for path, wanted in (
        (tmp_path, f"folder {tmp_path} has no config.json; give a transformers config.json or its folder"),
        (tmp_path / "none", f"there is no {tmp_path / 'none'}; give"),
        (tmp_path / "none" / "config.json", f"there is no folder {tmp_path / 'none'}; give"),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"model hf:{path}: {wanted}")) as caught:
            resolve_model(f"hf:{path}")
        assert "Errno" not in str(caught.value)


def test_a_configuration_without_a_path_is_not_that_of_the_present_folder(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"model 'hf:': names no path; write hf:PATH \(for this folder: hf:\.\)"):
        resolve_model("hf:")
    assert resolve_model("hf:.").family == "hf"


def test_a_module_of_the_present_folder_is_found_wherever_the_program_lies(tmp_path, monkeypatch):
    """`python -m` looks there by itself, the installed program does not."""
    (tmp_path / "lies_here.py").write_text("def build(): return 1\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", str(tmp_path))])
    assert load_function("lies_here:build")() == 1
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", str(tmp_path))])
    monkeypatch.delitem(sys.modules, "lies_here")
    assert resolve_model("lies_here:build").source == "lies_here:build"


def test_a_plan_cannot_have_code_loaded_that_a_configuration_names(tmp_path):
    """What is refused of a file is refused of the text in a plan, too."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_positions": 8}))
    spec = resolve_model(f"hf:{tmp_path}")
    for fields in ({"auto_map": {"AutoModel": "x"}}, {"attn_implementation": "a/b"}, {"n_layer": 10**9}):
        text = json.dumps({**hf_configuration(spec), **fields})
        with pytest.raises(ConfigError, match=r"names code to be run|more than 4096"):
            unit_names(replace(spec, config={**spec.config, "json": text}))
    with pytest.raises(ConfigError, match="is not that of a transformers model"):
        unit_names(replace(spec, config={}))


def test_a_model_of_more_modules_than_any_is_refused_while_it_is_built(monkeypatch, tmp_path):
    monkeypatch.setattr("spantrain.models.tracing.transformers_classes._MAX_PARTS", 50)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 9}))
    with pytest.raises(ConfigError, match="has more than 50 modules and parameters"):
        unit_names(resolve_model(f"hf:{tmp_path}"))


def test_a_configuration_that_the_library_cannot_build_is_named(tmp_path):
    fields = {"model_type": "gpt2", "vocab_size": 260, "n_embd": 10, "n_head": 3, "n_positions": 8}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match="the library cannot build GPT2LMHeadModel from this"):
        unit_names(resolve_model(f"hf:{tmp_path}"))


def test_a_configuration_of_a_model_of_sounds_is_named(tmp_path):
    fields = {"model_type": "whisper", "vocab_size": 260, "architectures": ["WhisperForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=r"WhisperForConditionalGeneration reads input_features, .*FILE.py:FUNCTION"):
        unit_names(resolve_model(f"hf:{tmp_path}"))


def test_a_configuration_needs_no_file_when_it_is_built(tmp_path):
    fields = {"model_type": "gpt2", "vocab_size": 260, "n_embd": 8, "n_head": 2, "n_layer": 2, "n_positions": 8}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    spec = resolve_model(f"hf:{tmp_path}")
    (tmp_path / "config.json").unlink()
    assert len(unit_names(replace(spec, source=""))) == 4


def test_weights_drawn_by_python_and_numpy_are_the_same_wherever_a_model_is_made(tmp_path):
    (tmp_path / "drawn.py").write_text(
        "import random, numpy, torch\n"
        "def build():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))\n"
        "    torch.nn.init.constant_(model[0].weight, random.random())\n"
        "    model[1].weight.data = torch.from_numpy(numpy.random.randn(3, 4)).float()\n"
        "    return model, (torch.randn(4, 4), torch.arange(4) % 3), torch.nn.functional.cross_entropy\n"
    )
    spec = resolve_model(f"{tmp_path / 'drawn.py'}:build")
    before = random.getstate()
    build_graph(spec)
    one, again, other = (build_units(spec, seed=seed)[-1].state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(again[name], one[name]) for name in one)
    assert not any(torch.equal(other[name], one[name]) for name in one)
    assert random.getstate() == before


def test_complex_weights_of_another_size_are_refused(tmp_path):
    (tmp_path / "wide.py").write_text(
        "import torch\n"
        "def build():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(4, 4, dtype=torch.complex128), torch.nn.Linear(4, 3))\n"
        "    return model, (torch.randn(4, 4), torch.arange(4) % 3), torch.nn.functional.cross_entropy\n"
    )
    with pytest.raises(ConfigError, match=r"parameter 0\.weight is complex128; make it torch\.complex64"):
        build_graph(resolve_model(f"{tmp_path / 'wide.py'}:build"))


def test_weights_that_are_others_each_time_are_named(tmp_path):
    (tmp_path / "drawn.py").write_text(
        "import random, torch\n"
        "def build():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))\n"
        "    torch.nn.init.constant_(model[1].weight, random.SystemRandom().random())\n"
        "    return model, (torch.randn(4, 4), torch.arange(4) % 3), torch.nn.functional.cross_entropy\n"
    )
    with pytest.raises(ConfigError, match=r"1\.weight begins with other numbers each time .*functions of torch"):
        build_graph(resolve_model(f"{tmp_path / 'drawn.py'}:build"))
