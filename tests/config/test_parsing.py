"""Whatever a file holds is answered within bounds: texts that are too large, too deep, too many in one, or no text."""

import json
import os
from pathlib import Path

import pytest

from spantrain.config.cluster_file import load_cluster, parse_cluster
from spantrain.config.files.parsing import OutOfRange, parse_json, parse_yaml_nodes
from spantrain.config.files.problems import Problems
from spantrain.config.files.text_files import check_tensor_header, read_text
from spantrain.errors import ConfigError
from spantrain.outer.outer_file import parse_outer
from testing.effort import calls_of

ALIASES = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9))


def keys(count: int) -> str:
    return "{" + ", ".join(f'"k{n}": 1' for n in range(count)) + ', "k0": 1}'


def test_a_key_given_twice_is_found_in_one_look():
    def look(count: int) -> int:
        def refused() -> None:
            with pytest.raises(ConfigError, match="x: keys given twice in one object: k0; keep one"):
                parse_json(keys(count), "x")

        return calls_of(refused)

    assert look(2000) < 2.1 * look(1000)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 5000, "x: is nested too deeply"),
        ("[" + "[]," * 2_000_100 + "[]]", "x: holds more than 4000000 values"),
        ("[NaN]", "x: holds NaN, which is no JSON number"),
        ('["\\ud800"]', r"x: holds '\\ud800', which is no text"),
        ('[{"\\u0000": 1}]', r"x: holds '\\x00', which is no text"),
        (
            "{" + ", ".join(f'"{n}": 1, "{n}": 2' for n in range(9)) + "}",
            "twice in one object: 0, 1, 2, 3, 4 and 4 more",
        ),
    ],
)
def test_json_that_is_refused(text, says):
    with pytest.raises(ConfigError, match=says):
        parse_json(text, "x")


def test_json_that_is_read():
    assert parse_json('["\\ud83d\\ude00", "\\u00e9"]', "x") == ["\U0001f600", "é"]
    assert parse_json('{"a": [1, -0.5, 1e-12, true, null]}', "x") == {"a": [1, -0.5, 1e-12, True, None]}
    assert parse_json("[Infinity]", "x", constants=True) == [float("inf")]


@pytest.mark.parametrize("number", ["1e400", "-1e41", "1e-61", "9223372036854775808", "9" * 5000, f"1.{'0' * 9}1e300"])
def test_numbers_that_nothing_can_be_are_told_as_written(number):
    (found,) = parse_json(f"[{number}]", "x")
    assert isinstance(found, OutOfRange)
    assert found.written == number


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 60, "x, line 1: is nested more than 50 deep"),
        ("- " * 100_000, "x, line 1: is nested more than 50 deep"),
        ("a0: &a0 [1]\n" + ALIASES, "x, line 6: holds more than 50000 values, aliases counted as what they stand for"),
        ("a: &a [1, *a]", "x, line 1: an alias stands inside of what it names"),
        ("[" + "[]," * 60_000 + "]", "x, line 1: holds more than 50000 values"),
        ("#" * 2**20 + "\n", "x: has more than 1048576 characters"),
        ("a: *b", "x, line 1: is not valid YAML"),
    ],
)
def test_yaml_that_is_refused(text, says):
    with pytest.raises(ConfigError, match=says):
        parse_yaml_nodes(text, "x")


def test_an_alias_may_stand_for_something_small():
    root = parse_yaml_nodes("rates: &rates [1, 2]\nagain: [*rates, *rates]", "x")
    assert root is not None
    assert root.value[0][1] is root.value[1][1].value[0]


def test_files_are_read_no_further_than_they_may_be_large(tmp_path: Path):
    def told(path: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            read_text(path, remedy="give another")
        return str(caught.value)

    assert told(Path("/dev/zero")) == "/dev/zero: has more than 128 MiB; give another"
    large = tmp_path / "large"
    with large.open("wb") as stream:
        os.truncate(stream.fileno(), 2**33)
    assert told(large) == f"{large}: has more than 128 MiB; give another"
    assert "File name too long; give another" in told(tmp_path / ("x" * 5000))
    assert "null byte; give another" in told(Path("a\0b"))
    marked = tmp_path / "marked"
    marked.write_bytes(b"\xef\xbb\xbf[1]")
    assert json.loads(read_text(marked, remedy="")) == [1]


def test_a_header_of_tensors_is_no_longer_than_any_model_needs(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    path.write_bytes((2**20).to_bytes(8, "little"))
    check_tensor_header(path)
    for size in (2**25, 2**63):
        path.write_bytes(size.to_bytes(8, "little") + b"{}")
        with pytest.raises(
            ConfigError, match=f"x.safetensors: is no safetensors file, or has a header of {size} bytes"
        ):
            check_tensor_header(path)


def test_a_wall_of_mistakes_is_told_shortly():
    problems = Problems("x")
    for number in range(20_000):
        problems.add(f"k{number}", problems.unknown("key", "naem" * 5000, ["name"] * 50))
    with pytest.raises(ConfigError) as caught:
        problems.check()
    assert "x: 20000 problems" in str(caught.value)
    assert "... and 19900 more" in str(caught.value)
    assert len(str(caught.value)) < 50_000


SITE = """
  - name: s{n}
    network: {{bandwidth: 1 Gbit/s, latency: 0.1 ms}}
    hosts: [{{name: {host}, count: {count}, devices: {{tx2: {each}}}}}]"""


@pytest.mark.parametrize(
    ("sites", "host", "count", "each", "says"),
    [
        (1100, "h{n}", 1, 1, "1100 sites are more than 1024"),
        (9, "h{n}", 1024, 64, "with this the cluster has more than 131072 devices"),
        (2, "x" * 60 + "{n}", 20, 2, "its device would be named"),
        (2, "x" * 62 + "{n}", 1024, 1, "its hosts would be named"),
        (2, "../../escaped{n}", 1, 1, "no name; use up to 63 letters"),
    ],
)
def test_clusters_that_are_too_large_or_have_no_names(sites, host, count, each, says):
    rows = [SITE.format(n=n, host=host.format(n=n), count=count, each=each) for n in range(sites)]
    default = "\nlinks:\n  - {between: all, bandwidth: 1 Gbit/s, latency: 1 ms}\n"
    with pytest.raises(ConfigError, match=says):
        parse_cluster("name: many\nsites:" + "".join(rows) + default, source="c.yaml")


def test_counts_of_a_file_are_held_to_their_bounds_whatever_their_digits(tmp_path: Path):
    """Ten and more digits count too, and none is too many to be told."""
    for samples in ("99999999999999999999", "1" + "0" * 5000):
        text = f"name: x\ndata: {{samples: {samples}, chunk_samples: 10}}\n"
        with pytest.raises(ConfigError, match="must be a whole number from 1 to 1000000000000"):
            parse_outer(text, source="outer.yaml", folder=tmp_path)


def test_a_device_file_is_no_endless_cluster():
    with pytest.raises(ConfigError, match="/dev/zero: has more than 128 MiB"):
        load_cluster(Path("/dev/zero"))
