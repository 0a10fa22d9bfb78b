"""A real comparison in small: two sites, two devices, real workers, torch's own frameworks beside our runtime."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from spantrain.app.reporter import SilentReporter
from spantrain.app.session import SessionOptions
from spantrain.cli.main import main
from spantrain.config.cluster_file import load_cluster, parse_cluster
from spantrain.config.traces.network_traces import network_trace
from spantrain.core.cluster import Cluster
from spantrain.core.job import TrainJob
from spantrain.errors import ConfigError
from spantrain.models.catalog.catalog import resolve_model
from spantrain.testbed.testbed import why_unavailable
from spantrain_studies.comparison.compare import CompareRequest, compare
from spantrain_studies.comparison.figures import CompareOutcome, ComparisonBounds
from spantrain_studies.comparison.fit import SettingOverrides
from spantrain_studies.comparison.methods import METHODS, methods_named
from spantrain_studies.comparison.real import as_it_is, shared_text
from spantrain_studies.comparison.show import CompareReporter, method_table
from spantrain_studies.comparison.worker.reference import reference_losses, rounding_error
from testing.runtime.kills import kill

EXAMPLES = Path(__file__).parents[2] / "examples"

TWO = """\
name: two
sites:
  - name: a
    network: {bandwidth: 1 Gbit/s, latency: 0.1 ms}
    hosts:
      - {name: a, backend: emulated, devices: {xavier-nx: 1}}
  - name: b
    network: {bandwidth: 1 Gbit/s, latency: 0.1 ms}
    hosts:
      - {name: b, backend: emulated, devices: {tx2: 1}}
links:
  - {between: [a, b], bandwidth: 100 Mbit/s, latency: 1 ms}
emulated_speed: 0.02
"""


class Listener(SilentReporter):
    """Remembers what it is shown."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.notes: list[str] = []
        self.part: CompareOutcome | None = None

    def ends_early(self, outcome: CompareOutcome) -> None:
        self.part = outcome

    def show_scale(self, scale) -> None:
        self.scale = scale

    def show_method(self, name, figures) -> None:
        self.shown.append(name)

    def note(self, text: str) -> None:
        self.notes.append(text)


def two() -> Cluster:
    return parse_cluster(TWO, source="test")


def request(out: Path, methods: str, global_batch: int = 4, **changes: object) -> CompareRequest:
    fields = {
        "cluster": two(),
        "model": resolve_model("gpt2-tiny"),
        "methods": methods_named(methods.split(",")),
        "out": out,
        "steps": 3,
    }
    overrides = SettingOverrides(global_batch=global_batch, emulated_speed=0.02, like="none")
    return CompareRequest(**{**fields, "overrides": overrides, **changes})


def test_other_cuts_of_a_batch_are_rounded_otherwise_and_no_more():
    model, job = resolve_model("gpt2-tiny"), TrainJob(steps=3)
    error = rounding_error(model, job, 4, reference_losses(model, job, 4))
    assert 0 < error < 1e-5


def on_processors(out: Path, methods: str, **changes: object) -> CompareRequest:
    overrides = SettingOverrides(global_batch=4)
    cluster = load_cluster(EXAMPLES / "one-machine.yaml")
    return request(out, methods, **{"cluster": cluster, "overrides": overrides, **changes})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_framework_learns_what_one_process_learns(tmp_path):
    """Same samples, same seeds, same update: only then is it a comparison of speed."""
    listener = Listener()
    shaped = why_unavailable() is None
    names = ",".join((*(name for name in METHODS if METHODS[name].kind == "framework"), "gpipe", "best-device"))
    outcome = compare(request(tmp_path, names), SessionOptions(network=shaped), listener)
    assert list(outcome.methods) == names.split(",") == listener.shown
    assert outcome.refused == {}
    for name, row in outcome.methods.items():
        assert row.loss_error < 1e-4, (name, row.losses)
        assert len(row.losses) == 3
        assert row.samples_per_s > 0
        assert row.peak_bytes > 4 * 4 * 300_000, "parameters, gradients and AdamW's state of half the model at least"
        assert 0 < row.utilisation <= 1
    if shaped:
        crossing = {name: sum(row.bytes.values()) for name, row in outcome.methods.items()}
        parameters = 2_400_000
        assert crossing["ddp"] > 1.9 * parameters, "a sum there and one back"
        assert crossing["best-device"] < parameters / 10
        assert crossing["torch-gpipe"] == pytest.approx(crossing["torch-1f1b"], rel=0.2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_cannot_run_is_told_and_the_rest_goes_on(tmp_path):
    """Three samples among two devices: sums of equal batches cannot be; pipelines can."""
    listener = Listener()
    outcome = compare(request(tmp_path, "ddp,torch-gpipe", global_batch=3), SessionOptions(network=False), listener)
    assert list(outcome.methods) == ["torch-gpipe"]
    assert "3 samples" in outcome.refused["ddp"]
    assert any("ddp does not run here" in note for note in listener.notes)
    assert outcome.methods["torch-gpipe"].ratio_to_first == 1.0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("by_signal", [True, False])
def test_what_was_measured_before_a_comparison_ends_early_is_kept(tmp_path, by_signal, capsys, monkeypatch):
    """On Ctrl-C, and where a worker is gone for good."""

    def ends(self: CompareReporter, name: str, figures: object) -> None:
        if by_signal:
            os.kill(os.getpid(), signal.SIGINT)
        else:
            kill(tmp_path / "out" / "logs" / "b.log")

    monkeypatch.setattr(CompareReporter, "show_method", ends)
    (tmp_path / "two.yaml").write_text(TWO)
    place = ["--cluster", str(tmp_path / "two.yaml"), "--no-network", "--out", str(tmp_path / "out")]
    words = "--model gpt2-tiny --methods torch-gpipe,torch-1f1b --steps 3 --like none --global-batch 4"
    with pytest.raises(SystemExit) as end:
        main(["compare", *place, *words.split(), "--emulated-speed", "0.02"])
    told = capsys.readouterr()
    assert end.value.code == (130 if by_signal else 1), told.err
    assert "ended early" in told.out
    document = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert list(document["methods"]) == ["torch-gpipe"]
    assert document["is_complete"] is False


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_on_real_processors_every_method_learns_the_same_and_nothing_is_said_of_emulation(tmp_path, monkeypatch):
    """Two processes on this machine; frameworks run as they are, one of each sort, our planner by what was measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = "fsdp,torch-interleaved,gpipe"
    listener = Listener()
    outcome = compare(on_processors(tmp_path / "out", names), SessionOptions(), listener)
    assert list(outcome.methods) == names.split(",")
    assert outcome.refused == {}
    for name, row in outcome.methods.items():
        assert row.loss_error < 1e-4, (name, row.losses)
        assert row.real_compute_ratio is None
        assert row.sound
        assert 0 < row.utilisation <= 1
    assert "4 stages" in outcome.methods["torch-interleaved"].what
    assert listener.scale.text == "2 of 2 devices, real ones"
    assert outcome.bounds == ComparisonBounds(link_data_parallel=None, link_pipeline=None, latency=None)
    assert outcome.setting.planned_by == "a measured profile"
    assert outcome.emulated.startswith("devices: all 2 real, a process with one thread each")
    assert "real compute" not in [column.header for column in method_table(outcome).columns]


def test_where_there_are_more_devices_than_processors_it_is_told():
    assert shared_text(1) == ""
    assert "4096 devices share" in shared_text(4096)


@pytest.mark.parametrize(
    ("backends", "says"),
    [
        (("cpu", "emulated"), "a: real devices beside emulated ones"),
        (("cuda:0", "cuda:1"), r"a \(cuda:0\), b \(cuda:1\): methods are compared on processors"),
    ],
)
def test_devices_that_are_not_alike_are_refused(tmp_path, backends, says):
    cluster = two()
    devices = tuple(replace(one, backend=own) for one, own in zip(cluster.devices, backends, strict=True))
    with pytest.raises(ConfigError, match=says):
        request(tmp_path, "ddp", cluster=replace(cluster, devices=devices))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"emulated_speed": 0.1}, "--emulated-speed: all devices are real"),
        ({"like": "gpt2-small"}, "--like gpt2-small: real devices cannot be slowed"),
        ({"bandwidth_bytes_per_s": 1e6}, "--bandwidth: all devices are on host here"),
        ({"network_speed": 0.5}, "--network-speed: all devices are on host here"),
    ],
)
def test_what_only_emulation_has_is_refused_on_processors(tmp_path, overrides, says):
    with pytest.raises(ConfigError, match=says):
        on_processors(tmp_path, "ddp", overrides=SettingOverrides(**overrides))


def test_a_single_host_has_no_link_to_change(tmp_path):
    with pytest.raises(ConfigError, match="--network-trace drop-50: all devices are on host here"):
        on_processors(tmp_path, "ddp", network_trace=network_trace("drop-50"))


def test_links_of_real_processors_have_the_rates_asked_for():
    """Their devices stay as they are, and as many."""
    cluster = replace(two(), devices=tuple(replace(one, backend="cpu") for one in two().devices))
    fitted = as_it_is(cluster, SettingOverrides(bandwidth_bytes_per_s=4e6, network_speed=0.5))
    assert {link.bandwidth_bytes_per_s for link in fitted.cluster.links} == {2e6}
    assert fitted.global_batch == 16
    assert fitted.scale.text == "2 of 2 devices, real ones; links at 0.5 of their rates"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--methods", "dpp"), "did you mean 'ddp'"),
        (("--bandwidth", "fast"), "--bandwidth"),
        (("--train-on", "questions"), "--train-on"),
        (("--like", "gpt3"), "gpt3"),
        (("--methods", "ddp", "--preset", "laptop"), "either --preset NAME or --cluster FILE"),
        (("--methods", "ddp", "--network-trace", "drop-50", "--no-network"), "--network-trace"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(tmp_path, capsys, words, says):
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(TWO)
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as ended:
        main(["compare", "--cluster", str(cluster), "--model", "gpt2-tiny", "--out", str(out), *words])
    assert ended.value.code == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_writes_json_and_a_picture(tmp_path, capsys):
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(TWO)
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as ended:
        main(
            ["compare", "--cluster", str(cluster), "--model", "gpt2-tiny", "--methods", "ddp,auto", "--steps", "3",
             "--global-batch", "4", "--emulated-speed", "0.02", "--no-network", "--json",
             "--out", str(out)]
        )  # fmt: skip
    assert ended.value.code in (0, None)
    document = json.loads(capsys.readouterr().out)
    assert document["setting"]["methods"] == ["ddp", "auto"]
    assert set(document["methods"]) == {"ddp", "auto"}
    assert json.loads((out / "compare.json").read_text()) == document
    assert (out / "compare.svg").read_text().startswith("<svg")
