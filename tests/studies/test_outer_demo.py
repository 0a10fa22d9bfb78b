"""The outer optimizer's demonstration: what it makes of what its processes say, its picture, and all of it in short."""

import threading
from pathlib import Path
from xml.etree import ElementTree

import pytest

from spantrain.errors import WorkerError
from spantrain_studies.outer_demo.demo import draw_losses, run_outer_demo
from spantrain_studies.outer_demo.orders import DemoCluster, OuterDemoOptions
from spantrain_studies.outer_demo.record import ClusterRow, DemoRecord


def record() -> DemoRecord:
    rows = {name: ClusterRow(name=name, speed=speed, step_s=0.2 / speed) for name, speed in (("a", 1.0), ("b", 0.5))}
    return DemoRecord(rows=rows)


def trained() -> DemoRecord:
    """Cluster a did 90 of 100 steps that it could have done, b 50 of 50."""
    found = record()
    found.hear(0.0, "a", {"heldout_loss": 5.5})
    found.hear(0.5, "b", {"heldout_loss": 5.5})
    found.hear(10.0, "a", {"inner_steps": 1, "tokens": 512, "version": 0, "loss": 5.4})
    found.hear(15.0, "master", {"version": 3, "left_out": 0})
    found.hear(20.0, "a", {"inner_steps": 40, "tokens": 20480, "version": 3, "loss": 4.0, "heldout_loss": 4.1})
    found.links({"a": (1e6, 2e6)})
    found.hear(30.0, "a", {"inner_steps": 90, "tokens": 46080, "version": 5, "train_s": 19.9, "loop_s": 20.0,
                           "outer_rounds": 5, "mean_staleness": 0.5, "comm_s": 8.0, "blocked_s": 0.1,
                           "heldout_loss": 3.2, "real_compute_ratio": 0.08})  # fmt: skip
    found.hear(31.0, "b", {"inner_steps": 50, "tokens": 25600, "version": 6, "train_s": 20.0, "loop_s": 20.0,
                           "heldout_loss": 3.0, "real_compute_ratio": 0.05})  # fmt: skip
    found.hear(32.0, "master", {"version": 6, "left_out": 1})
    return found


def test_figures_follow_from_what_was_said() -> None:
    summary = trained().summary(picture="loss.svg", emulated="all")
    assert (summary.loss_first, summary.loss_last) == (5.5, 3.0)
    assert (summary.versions, summary.rejected_updates) == (6, 1)
    assert summary.throughput_vs_ideal == pytest.approx(140 / 150)
    a = summary.clusters["a"]
    assert (a.tokens, a.inner_steps, a.outer_rounds, a.mean_staleness, a.comm_s, a.train_s) == (
        46080, 90, 5, 0.5, 8.0, 19.9,
    )  # fmt: skip
    assert a.throughput_vs_ideal == pytest.approx(0.9)
    assert summary.clusters["b"].real_compute_ratio == 0.05


def test_time_begins_with_the_first_inner_step_and_tokens_are_everybodys() -> None:
    points = trained().points
    assert [(point.cluster, point.time_s, point.tokens) for point in points] == [
        ("a", 0.0, 0), ("b", 0.0, 0), ("a", 10.0, 20480), ("a", 20.0, 46080), ("b", 21.0, 71680),
    ]  # fmt: skip


def test_rows_show_states_and_links() -> None:
    found = trained()
    assert found.rows["a"].state == "done"
    assert (found.rows["a"].up_bytes_per_s, found.rows["b"].up_bytes_per_s) == (1e6, None)
    found.lost("b")
    assert found.rows["b"].state == "gone"


def test_without_training_there_is_nothing_to_sum_up() -> None:
    with pytest.raises(WorkerError, match="no cluster"):
        record().summary(picture="", emulated="")


def test_the_picture_has_a_line_for_each_cluster_in_both_panels() -> None:
    root = ElementTree.fromstring(draw_losses(trained().points, "Loss <of all>"))
    colours = [line.get("stroke") for line in root.iter("{http://www.w3.org/2000/svg}line")]
    assert colours.count("#1f77b4") == 1 + 2 * 2
    assert colours.count("#d62728") == 1 + 2 * 1


class Listener:
    """Remembers what it hears."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.shown = 0

    def phase(self, text: str) -> None:
        self.phases.append(text)

    def note(self, text: str) -> None:
        self.phases.append(text)

    def show(self, record: DemoRecord, elapsed_s: float, total_s: float) -> None:
        self.shown += 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_clusters_train_together_and_leave_nothing(tmp_path: Path) -> None:
    clusters = tuple(
        DemoCluster(name=name, speed=speed, bandwidth_bytes_per_s=1e9, latency_s=0.0)
        for name, speed in (("a", 1.0), ("b", 0.5))
    )
    options = OuterDemoOptions(
        clusters=clusters, inner_steps=4, seconds=8.0, step_s=0.05, batch=2, grace_s=0.2, network=False
    )
    listener = Listener()
    summary = run_outer_demo(options, tmp_path, listener)
    assert summary.loss_last < summary.loss_first
    assert summary.versions >= 2
    assert set(summary.clusters) == {"a", "b"}
    assert all(row.outer_rounds >= 1 and row.tokens == row.inner_steps * 2 * 64 for row in summary.clusters.values())
    assert {point.cluster for point in summary.losses} == {"a", "b"}
    assert Path(summary.picture).exists()
    assert listener.shown
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-")]
