"""Names of models, and options that they refuse."""

import subprocess
import sys

import pytest

from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError, UsageError
from spantrain.models.catalog.catalog import MODEL_NAMES, resolve_model, unit_names
from testing.patience import PATIENCE_S


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_catalog_every_name_resolves_to_units_with_names_of_their_own(name):
    names = unit_names(resolve_model(name))
    assert len(set(names)) == len(names) >= 6


def test_catalog_published_depths():
    assert len(unit_names(resolve_model("resnet-101"))) == 33 + 2
    assert len(unit_names(resolve_model("efficientnet-b1"))) == 23 + 2
    assert len(unit_names(resolve_model("bert-small"))) == 4 + 2
    assert resolve_model("bert-small").config["hidden_size"] == 512


def test_catalog_unknown_name_has_near_matches():
    with pytest.raises(UsageError, match=r"no model named 'gpt-tiny'; did you mean gpt2-tiny"):
        resolve_model("gpt-tiny")
    with pytest.raises(ConfigError, match=r"no model named 'xyzzy'; Models: gpt2-tiny"):
        resolve_model("xyzzy")


def test_catalog_unknown_family_in_a_foreign_file():
    with pytest.raises(ConfigError, match="no family 'llama'"):
        unit_names(ModelSpec(name="m", family="llama", config={}, dataset="digits"))


def test_catalog_sequence_length_grows_the_position_table():
    assert resolve_model("gpt2-tiny", sequence_length=128).config["n_positions"] == 128
    assert resolve_model("gpt2-small", sequence_length=128).config["n_positions"] == 1024


def test_catalog_options_that_cannot_be_honoured_are_refused():
    with pytest.raises(ConfigError, match="sequence length 8 cannot be used"):
        resolve_model("resnet-tiny", sequence_length=8)
    with pytest.raises(ConfigError, match="sequence length must be from 2 to"):
        resolve_model("gpt2-tiny", sequence_length=1)


def test_catalog_imports_no_torch():
    code = (
        "import sys, spantrain.models.catalog.catalog; sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=PATIENCE_S).returncode == 0
