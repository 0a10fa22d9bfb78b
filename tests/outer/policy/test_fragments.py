"""A model in fragments: which layers each has, when each is pushed, and what its masters share."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spantrain.config.files.json_codec import from_json, to_json
from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.events import TransferWay, of_fragment
from spantrain.core.outer.layers import divide, fragment_layouts
from spantrain.errors import ProtocolError
from spantrain.outer.policy.chunks import ChunkState
from spantrain.outer.policy.fragments import FragmentedMaster, FragmentedState
from spantrain.outer.policy.pushes import PushRounds
from spantrain.outer.policy.settings import MasterState, OuterSettings
from testing.outer.policy import MadeUpWorld, layers_of, without_clip
from testing.outer.training import learn, say


@given(st.lists(st.integers(1, 50), min_size=1, max_size=24), st.integers(1, 4), st.integers(1, 4))
def test_each_layer_is_in_one_fragment_and_each_shard_has_some_of_each(sizes, shards, fragments):
    names = [f"s{k}" for k in range(shards)]
    layers = layers_of(*sizes)
    if len(sizes) < shards * fragments:
        with pytest.raises(ValueError, match=r"each (shard|of)"):
            divide(layers, names, fragments=fragments)
        return
    whole = divide(layers, names, fragments=fragments)
    parts = fragment_layouts(whole, fragments)
    for index, layer in enumerate(whole.layers):
        part = parts[index % fragments]
        assert part.layers[index // fragments] is layer
        assert part.shard_of(index // fragments) == whole.shard_of(index)
    assert sum(len(part.layers) for part in parts) == len(layers)
    assert all(part.shards == whole.shards for part in parts)


@given(st.integers(1, 40), st.integers(1, 5), st.data())
def test_a_fragment_is_pushed_at_its_own_steps(inner_steps, fragments, data):
    """At f H / F and every H steps from there, also if a push now and then must wait a little."""
    number = data.draw(st.integers(0, fragments - 1))
    steps = PushRounds(inner_steps, fragment=number, fragments=fragments)
    steps.begin_push()
    offset, near = number * inner_steps // fragments, inner_steps / fragments / 2
    waits = 0
    for _ in range(5 * inner_steps):
        steps.step(1)
        if steps.is_due() and not waits:
            late = (steps.steps - offset) % inner_steps
            assert late < max(1.0, near) or fragments == 1
            steps.begin_push()
            waits = data.draw(st.integers(0, max(0, math.ceil(near) - 1))) if fragments > 1 else 0
        elif steps.is_due():
            waits -= 1


def test_a_state_comes_back_from_json_and_is_refused_for_another_number_of_fragments():
    state = FragmentedState.of(3, ChunkState(samples=10, chunks=2))
    assert from_json(FragmentedState, to_json(state), "a state") == state
    with pytest.raises(ValueError, match="the state is of 3 fragments, the settings are of 2"):
        FragmentedMaster(divide(layers_of(1, 1), ["s0"], fragments=2), OuterSettings(fragments=2), state)
    with pytest.raises(ValueError, match="only the first leases data"):
        FragmentedState(fragments=(MasterState(), *state.fragments))


def begun(fragments: int = 2, **more) -> FragmentedMaster:
    """A master whose one shard has come, with nothing in it, and whose clusters a and b are registered."""
    layout = divide(layers_of(*[4] * 2 * fragments), ["s0"], fragments=fragments)
    master = FragmentedMaster(layout, OuterSettings(fragments=fragments, **more))
    for number, part in enumerate(master.parts):
        master.on_event(0.0, of_fragment(number, on.ShardRegistered(shard="s0", versions=())))
        for name in ("a", "b"):
            workers = {name: tuple(range(len(part.layout.layers)))}
            master.on_event(0.0, of_fragment(number, on.ClusterRegistered(cluster=name, workers=workers)))
    return master


def ask(master: FragmentedMaster, name: str, number: int) -> list[do.OuterCommand]:
    asked = on.PushAsked(cluster=name, base_version=0, tokens=0)
    return list(master.on_event(0.0, of_fragment(number, asked)))


def test_one_cluster_brings_all_first_parameters_and_another_only_when_it_is_gone():
    master = begun()
    assert any(isinstance(one, do.StartPush) for one in ask(master, "a", 1))
    (refused,) = ask(master, "b", 0)
    assert (refused.fragment, refused.reason) == (0, "a brings the first parameters")
    master.on_event(0.0, on.ClusterLeft(cluster="a"))
    assert any(isinstance(one, do.StartPush) for one in ask(master, "b", 0))


def streaming(fragments: int = 2, **more) -> MadeUpWorld:
    """Two clusters and a shard that have met; nobody has brought parameters."""
    made = MadeUpWorld(2, 1, settings=without_clip(fragments=fragments), **{"samples": 12, "chunks": 4, **more})
    made.settle()
    return made


def push_on(made: MadeUpWorld, name: str, number: int) -> None:
    """Let a cluster push one fragment, and the window end."""
    say(made, name, made.clusters[name].ask(number))
    made.settle()
    made.pass_time(2.0)
    made.settle()


def leave_between(made: MadeUpWorld, name: str, *, pushed: int) -> None:
    """Let a cluster learn all data, push one fragment of it, and leave before the window ends."""
    push_on(made, name, 0)
    push_on(made, name, 1)
    learn(made, name, name)
    say(made, name, made.clusters[name].ask(pushed))
    made.settle()
    made.tell(on.ClusterLeft(cluster=name))
    made.kill(name)
    made.pass_time(2.0)
    made.settle()


@pytest.mark.parametrize("fragments", [1, 2])
def test_who_brings_first_parameters_that_are_not_finite_keeps_nobody_else_from_it(fragments):
    made = streaming(fragments)
    made.clusters["c0"].spoiled = True
    for name, comes_to in (("c0", False), ("c1", True)):
        for number in range(fragments):
            push_on(made, name, number)
        assert made.whole.state.seeded is comes_to


def test_what_all_shards_lost_of_a_fragment_anybody_may_bring_again():
    """The first that brought it lives, has begun to bring the other, and has nothing more to give of this one."""
    made = streaming()
    push_on(made, "c0", 0)
    made.kill("s0")
    made.revive("s0")
    made.settle()
    push_on(made, "c0", 1)
    assert [part.state.seeded for part in made.whole.parts] == [False, True]
    assert not made.clusters["c0"].ask(0)
    learn(made, "c1")
    push_on(made, "c1", 0)
    assert made.whole.state.seeded


def test_who_leaves_between_its_pushes_counts_where_it_had_pushed():
    """What it had learned is in the first fragment, counts once, and is leased to nobody."""
    made = streaming(samples=3, chunks=1)
    leave_between(made, "c0", pushed=0)
    assert [len(made.lessons(number)) for number in range(2)] == [3, 0]
    assert made.whole.state.leading.clusters["c0"].tokens == 3
    assert made.whole.state.leading.chunks.counted == 3
    learn(made, "c1")
    assert not made.clusters["c1"].leases


def test_what_a_cluster_that_left_had_not_pushed_of_the_first_fragment_is_leased_again():
    """The first fragment counts data, so another learns from it too: in the second it is then from both."""
    made = streaming(samples=3, chunks=1)
    leave_between(made, "c0", pushed=1)
    assert made.whole.state.leading.clusters["c0"].tokens == 0
    learn(made, "c1", "c1")
    push_on(made, "c1", 0)
    push_on(made, "c1", 1)
    assert [len(made.lessons(number)) for number in range(2)] == [3, 6]
    assert made.whole.state.leading.chunks.counted == 3
    assert made.whole.state.leading.clusters["c1"].tokens == 3


def test_fragments_share_the_lines_and_no_ticket():
    """With two slots no more than two layers go at a time, whichever fragments they are of."""
    master = begun(3)
    for number in range(3):
        ask(master, "a", number)
    under_way = master.lines.moving
    assert len(under_way) == 2
    seen = []
    while under_way:
        way, transfer = under_way[0]
        seen.append((transfer.ticket, transfer.layer))
        assert transfer.ticket.number % 3 == master.layer_of(transfer) % 3
        for command in master.on_event(0.0, on.Moved(way=way, transfer=transfer)):
            if isinstance(command, do.Move):
                assert command.fragment == command.transfer.ticket.number % 3
                assert command.way is TransferWay.PUSH
        under_way = master.lines.moving
    assert len(seen) == len(set(seen)) == 6


def test_what_is_of_a_member_is_told_once_and_what_is_of_no_fragment_is_refused():
    master = begun()
    told = master.on_event(0.0, on.ClusterBeat(cluster="c"))
    assert [type(one) for one in told] == [do.RegisterAgain]
    with pytest.raises(ProtocolError, match="PullAsked is of fragment 2, but there are 2"):
        master.on_event(0.0, of_fragment(2, on.PullAsked(cluster="a")))
    master.on_event(0.0, on.ShardLost(shard="s0", reason="test"))
    assert all(part.shards.away == ("s0",) for part in master.parts)


def test_the_limit_of_the_norm_is_of_the_whole():
    master = begun(4, clip_norm=3.0)
    limits = [part._settings.clip_norm for part in master.parts]
    assert math.hypot(*limits) == pytest.approx(3.0)
    assert begun(1, clip_norm=0.3).parts[0]._settings.clip_norm == 0.3
