"""The master with made-up clusters: when a window ends, whose rounds end with it, how large its step is."""

import pytest

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.outer.policy.client import ClientPhase
from testing.outer.policy import MadeUpWorld
from testing.outer.training import last_window, learn, say, seeded_world


def test_the_window_waits_for_the_grace_and_no_longer_where_all_are_there():
    made = seeded_world(2, grace_s=5.0)
    learn(made, "c0", "c1")
    before = made.master.state.updates
    say(made, "c0", made.clusters["c0"].ask())
    made.settle()
    assert made.master.state.updates == before
    say(made, "c1", made.clusters["c1"].ask())
    made.settle()
    assert made.master.state.updates == before + 1
    assert {verdict.cluster for verdict in made.master.updates.last.verdicts} == {"c0", "c1"}
    learn(made, "c0")
    say(made, "c0", made.clusters["c0"].ask())
    made.settle()
    made.pass_time(5.5)
    made.settle()
    assert made.master.state.updates == before + 2


def test_the_end_of_one_clusters_round_ends_that_of_all():
    made = seeded_world(3, grace_s=5.0)
    learn(made, "c0", "c1", "c2")
    before = made.master.state.updates
    say(made, "c0", made.clusters["c0"].ask(ends_round=True))
    made.settle()
    assert made.master.state.updates == before + 1, "nobody has to wait for the grace"
    assert last_window(made) == {"c0", "c1", "c2"}


def test_a_window_does_not_wait_for_who_has_nothing_to_push():
    made = seeded_world(3, grace_s=5.0)
    learn(made, "c0", "c1")
    before = made.master.state.updates
    say(made, "c0", made.clusters["c0"].ask(ends_round=True))
    made.settle()
    assert made.master.state.updates == before + 1
    assert last_window(made) == {"c0", "c1"}
    learn(made, "c0", "c1", "c2")
    for name in ("c0", "c1"):
        say(made, name, made.clusters[name].ask())
        made.settle()
    assert made.master.state.updates == before + 1, "who had nothing then is waited for again"
    say(made, "c2", made.clusters["c2"].ask())
    made.settle()
    assert last_window(made) == {"c0", "c1", "c2"}


@pytest.mark.parametrize("options", [{"common_rounds": False}, {}])
def test_a_push_of_a_part_of_a_round_or_without_common_rounds_ends_no_other(options):
    made = seeded_world(2, grace_s=5.0, **options)
    learn(made, "c0", "c1")
    say(made, "c0", made.clusters["c0"].ask(ends_round=bool(options)))
    made.settle()
    assert made.clusters["c1"].client.phase is ClientPhase.FREE
    made.pass_time(5.5)
    made.settle()
    assert last_window(made) == {"c0"}


def test_the_round_of_a_cluster_is_ended_once_for_each_window():
    made = seeded_world(3, grace_s=5.0)
    learn(made, "c0", "c1")
    for name in ("c0", "c1"):
        say(made, name, made.clusters[name].ask(ends_round=True))
    ended = []
    while made.busy_lines:
        line = made.busy_lines[0]
        ended += [line for one in list(made.lines[line])[:1] if isinstance(one, do.EndRound)]
        made.deliver(line)
    assert sorted(ended) in (["c1", "c2"], ["c0", "c2"], ["c2"])


def test_each_window_has_a_round_that_is_ended_for_all():
    made = seeded_world(2, grace_s=5.0, samples=60, chunks=20)
    for _ in range(3):
        learn(made, "c0", "c1")
        before = made.master.state.updates
        say(made, "c0", made.clusters["c0"].ask(ends_round=True))
        made.settle()
        assert made.master.state.updates == before + 1, "nobody has to wait for the grace"
        assert last_window(made) == {"c0", "c1"}


def begin_to_train(made: MadeUpWorld) -> None:
    """Let all say that they train."""
    for name in made.clusters:
        made.tell(on.TrainingBegun(cluster=name))


def stages(made: MadeUpWorld) -> list[do.StageVersion]:
    """Let all messages arrive; return what the first shard was told to stage."""
    found = []
    while made.busy_lines:
        line = made.busy_lines[0]
        if line == "s0" and isinstance(made.lines[line][0], do.StageVersion):
            found.append(made.lines[line][0])
        made.deliver(line)
    return found


def test_a_window_with_some_of_the_clusters_is_a_part_of_a_step():
    """Four clusters that train; two have never pushed, and are taken to be as the others are."""
    made = seeded_world(4, grace_s=5.0, samples=60, chunks=20)
    begin_to_train(made)
    parts = []
    for names in (["c0"], ["c1"], ["c0", "c1"], ["c0", "c1", "c2", "c3"]):
        for name in names:
            for _ in range(3 if name == "c1" else 2):
                say(made, name, made.clusters[name].train())
                made.settle()
            say(made, name, made.clusters[name].ask())
        parts += [stage.part for stage in stages(made)]
        made.pass_time(6.0)
        parts += [stage.part for stage in stages(made)]
    assert parts == pytest.approx([1 / 4, 2 / 6, 3 / 6, 1.0])


def test_what_the_last_one_of_all_pushes_is_a_part_of_the_round_of_those_that_ended():
    """Of three clusters two end with a round; the third has some samples left, and then goes on alone."""
    made = seeded_world(3, grace_s=5.0, samples=60, chunks=20)
    begin_to_train(made)
    for name, steps in {"c0": 3, "c1": 3, "c2": 2}.items():
        for _ in range(steps):
            say(made, name, made.clusters[name].train())
            made.settle()
        say(made, name, made.clusters[name].ask())
    assert [stage.part for stage in stages(made)] == [1.0]
    for name in ("c0", "c1"):
        made.tell(on.ClusterLeft(cluster=name))
    parts = []
    for _ in range(2):
        learn(made, "c2")
        say(made, "c2", made.clusters["c2"].ask())
        parts += [stage.part for stage in stages(made)]
    assert parts == pytest.approx([2 / 6, 1.0])


def test_a_whole_step_for_each_window_is_an_option():
    made = seeded_world(2, part_steps=False)
    learn(made, "c0")
    begin_to_train(made)
    say(made, "c0", made.clusters["c0"].ask())
    made.settle()
    made.pass_time(2.0)
    assert [stage.part for stage in stages(made)] == [1.0]
