"""outer.yaml: what it says, and all that can be wrong with it in one message."""

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import pytest
from torch import Tensor

from spantrain.core.records import Bounds
from spantrain.errors import ConfigError
from spantrain.formats.registry import WireFormat
from spantrain.outer.outer_file import load_outer, parse_outer
from spantrain.outer.policy.guard import GuardSettings
from spantrain.outer.policy.settings import OuterSettings
from spantrain.outer.rules.nesterov import Nesterov
from spantrain.outer.rules.registry import OuterRule

SMALL = """\
name: two-places
master: {address: "192.0.2.7:29500", state: state/master}
shards:
  - {name: s0, address: "192.0.2.7:29510", snapshots: state/s0}
  - {name: s1, address: "[2001:db8::7]:0", listen: "::", snapshots: /var/s1}
"""
WHOLE = """\
inner_steps: 16
rule: {learning_rate: 1, momentum: 0}
settings:
  {grace: 0 s, clip_norm: none, part_steps: off, common_rounds: off, staleness_power: 0.5, lost_after: 5 s,
   transfer_limit: 2 min, lease: 1 h, shard_slots: 2, worker_slots: 3, push_format: int8, compensation: 0.1,
   fragments: 4, ahead: 0.25}
guard: {smoothing: 0.1, factor: 2, warm_up: 4, wild: 5, restart_after: 3}
data: {samples: 1000, chunk_samples: 64, passes: 3}
encryption: off
placement:
  model: 500 MB
  clusters:
    - {name: a, tokens_per_s: 1000, line: 1 Gbit/s}
    - {name: b, tokens_per_s: 500}
  places:
    - {name: x, bandwidth: {a: 100 Mbit/s, b: 8 Mbit/s}, memory: 1 GiB}
    - {name: y, bandwidth: {a: 8 Mbit/s, b: 8 Mbit/s}}
"""


def parse(text: str):
    return parse_outer(text, source="outer.yaml", folder=Path("/home/me"))


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    return str(caught.value).splitlines()


def test_what_must_be_said_is_enough() -> None:
    config = parse(SMALL)
    assert (str(config.master.address), config.master.listen) == ("192.0.2.7:29500", config.master.address)
    assert config.master.folder == Path("/home/me/state/master")
    assert [(shard.name, str(shard.address), str(shard.listen)) for shard in config.shards] == [
        ("s0", "192.0.2.7:29510", "192.0.2.7:29510"),
        ("s1", "[2001:db8::7]:0", "[::]:0"),
    ]
    assert config.shard("s1").folder == Path("/var/s1")
    told = config.for_master
    assert (config.inner_steps, told.rule, told.settings) == (64, Nesterov(), OuterSettings())
    assert told.encrypted
    assert (told.samples, told.chunks, told.passes) == (0, 0, None)
    assert config.places is None


def test_all_numbers_can_be_said() -> None:
    config = parse(SMALL + WHOLE)
    assert (config.inner_steps, config.for_master.rule) == (16, Nesterov(learning_rate=1.0, momentum=0.0))
    assert config.for_master.settings == OuterSettings(
        grace_s=0.0,
        clip_norm=None,
        part_steps=False,
        common_rounds=False,
        ahead=0.25,
        staleness_power=0.5,
        lost_after_s=5.0,
        transfer_limit_s=120.0,
        lease_s=3600.0,
        shard_slots=2,
        worker_slots=3,
        push_format=WireFormat.INT8,
        fragments=4,
        compensation=0.1,
        guard=GuardSettings(smoothing=0.1, factor=2.0, warm_up=4, wild=5.0, restart_after=3),
    )
    assert not config.for_master.encrypted


def test_data_and_places_can_be_said() -> None:
    config = parse(SMALL + WHOLE)
    told = config.for_master
    assert (told.samples, told.chunks, told.passes) == (1000, 15, 3)
    assert parse(SMALL + WHOLE.replace("passes: 3", "passes: none")).for_master.passes is None
    places = config.places
    assert places is not None
    assert (config.model_bytes, places.throughput) == (500_000_000, {"a": 1000.0, "b": 500.0})
    assert places.bandwidth_bytes_per_s == {"x": {"a": 12.5e6, "b": 1e6}, "y": {"a": 1e6, "b": 1e6}}
    assert (places.line_bytes_per_s, places.memory_bytes) == ({"a": 125e6}, {"x": 2**30})


def test_empty_tables_say_nothing() -> None:
    told = parse(SMALL + "rule:\nsettings:\n").for_master
    assert (told.rule, told.settings) == (Nesterov(), OuterSettings())


@dataclass(frozen=True, kw_only=True)
class PlainDescent(OuterRule):
    """Steps along the mean, and keeps nothing."""

    name: ClassVar[str] = "plain-descent"
    learning_rate: Annotated[float, Bounds(over=0, under=2)] = 1.0

    def step(self, ahead: Tensor, old: Sequence[Tensor], new: Sequence[Tensor], part: float) -> float:
        return self.learning_rate


def test_a_rule_that_somebody_defined_is_named_with_its_numbers_and_bounds() -> None:
    assert parse(SMALL + "rule: {name: plain-descent, learning_rate: 0.5}\n").for_master.rule == PlainDescent(
        learning_rate=0.5
    )
    (said,) = problems(SMALL + "rule: {name: plain-descent, learning_rate: 2}\n")
    assert "2 must be between 0 and 2" in said
    assert "'adam' must be one of nesterov, plain-descent" in "\n".join(problems(SMALL + "rule: {name: adam}\n"))


def test_all_problems_are_told_at_once_with_their_lines() -> None:
    told = problems(
        """\
name: two places
master: {address: 0.0.0.0:29500, state: m}
shards:
  - {name: s0, address: host, snapshots: s}
  - {name: s0, address: host:29510, snapshots: s}
iner_steps: 3
rule: {learning_rate: 0, momentum: 1}
settings: {grace: 5, push_format: int7, compensation: 2}
data: {samples: 10, chunk_samples: 20}
encryption: maybe
placement:
  model: 1 GB
  clusters:
    - {name: a, tokens_per_s: -1}
  places:
    - {name: x, bandwidth: {b: 1 Gbit/s}}
"""
    )
    assert told[0] == "outer.yaml: 16 problems"
    text = "\n".join(told)
    for line, words in [
        (1, "'two places' is no name"),
        (2, "0.0.0.0 is where to listen"),
        (4, "'host' is not an address"),
        (5, "two shards are named 's0'"),
        (3, "s0 and s0 would share /home/me/s"),
        (6, "unknown key 'iner_steps'; did you mean 'inner_steps'?"),
        (7, "0 must be more than 0"),
        (7, "1 must be at least 0 and less than 1"),
        (8, "'5' needs a number and one of"),
        (8, "'int7' must be one of native, float16, bfloat16, int8, int4"),
        (8, "2 must be from 0 to 1"),
        (9, "a chunk of 20 samples is more than all 10"),
        (10, "'maybe' must be on or off"),
        (14, "-1 must be more than 0"),
        (16, "unknown cluster 'b'"),
        (16, "a is missing"),
    ]:
        assert any(re.search(rf"line {line}\b", one) and words in one for one in told), (line, words, text)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("29500", "65535", "needs this port and the next one"),
        ("29510", "29501", "s0 and the master would share 192.0.2.7:29501"),
        ("state/s0", "/var/s1", "s1 and s0 would share /var/s1"),
        ('listen: "::"', "listen: a b", "'a b' is no host"),
        ("- {name: s0", "- {nam: s0", "needs name"),
        ("name: s1", f"name: {'s' * 33}", "has 33 letters; a shard's name has up to 32"),
    ],
)
def test_places_that_cannot_be(old: str, new: str, says: str) -> None:
    assert says in "\n".join(problems(SMALL.replace(old, new)))


def test_more_than_a_master_can_keep_is_refused() -> None:
    rows = "".join(f'  - {{name: t{k}, address: "h:0", snapshots: state/t{k}}}\n' for k in range(99))
    (said,) = problems(SMALL + rows)
    assert "shards: 101 shards are more than 100; give fewer, each with more layers" in said
    (said,) = problems(SMALL + "data: {samples: 2000001, chunk_samples: 1}\n")
    assert "data.chunk_samples: 2000001 chunks are more than 1000000; make them larger" in said


@pytest.mark.parametrize("text", ["", "# nothing\n\n"])
def test_an_empty_file_names_the_page(text: str) -> None:
    assert problems(text) == ["outer.yaml: is empty; name a file such as docs/outer.md shows"]


def test_a_shard_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="no shard 's2'; it has s0, s1"):
        parse(SMALL).shard("s2")


def test_the_page_shows_a_file_that_loads(examples: Path, tmp_path: Path) -> None:
    page = (examples.parent / "docs" / "outer.md").read_text(encoding="utf-8")
    shown = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert shown
    for number, text in enumerate(shown):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        load_outer(path)


def test_a_file_is_read_without_torch() -> None:
    code = "import sys; from spantrain.outer.rules.registry import rules; from spantrain.outer import outer_file"
    assert not subprocess.run([sys.executable, "-c", f"{code}; rules(); sys.exit('torch' in sys.modules)"]).returncode
