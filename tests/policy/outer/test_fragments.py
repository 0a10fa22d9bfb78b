"""A model in fragments: which layers each has, when each is pushed, and what its masters share."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from made_up_outer import layers_of
from spantrain.config.artefacts import from_json
from spantrain.config.json_codec import to_json
from spantrain.core import outer_commands as do
from spantrain.core import outer_events as on
from spantrain.core.outer_events import Way, tag_event, untag_event
from spantrain.errors import ProtocolError
from spantrain.policy.outer.chunks import ChunkState
from spantrain.policy.outer.fragments import FragmentedMaster, FragmentedState
from spantrain.policy.outer.layout import divide, fragment_layouts
from spantrain.policy.outer.round_steps import RoundSteps
from spantrain.policy.outer.settings import MasterState, OuterSettings


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
    steps = RoundSteps(inner_steps, fragment=number, fragments=fragments)
    steps.begin_push()
    offset, near = number * inner_steps // fragments, inner_steps / fragments / 2
    waits = 0
    for _ in range(5 * inner_steps):
        steps.step()
        if steps.is_over and not waits:
            late = (steps.steps - offset) % inner_steps
            assert late < max(1.0, near) or fragments == 1
            steps.begin_push()
            waits = data.draw(st.integers(0, max(0, math.ceil(near) - 1))) if fragments > 1 else 0
        elif steps.is_over:
            waits -= 1


def test_a_state_comes_back_from_json_and_is_refused_for_another_number_of_fragments():
    state = FragmentedState.of(3, ChunkState.of(10, 2))
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
        master.on_event(0.0, tag_event(number, on.ShardRegistered(shard="s0", versions=())))
        for name in ("a", "b"):
            workers = {name: tuple(range(len(part.layout.layers)))}
            master.on_event(0.0, tag_event(number, on.ClusterRegistered(cluster=name, workers=workers)))
    return master


def ask(master: FragmentedMaster, name: str, number: int) -> list[do.OuterCommand]:
    asked = on.PushAsked(cluster=name, base_version=0, tokens=0)
    return list(master.on_event(0.0, tag_event(number, asked)))


def test_one_cluster_brings_all_first_parameters_and_another_only_when_it_is_gone():
    master = begun()
    assert any(isinstance(one, do.StartPush) for one in ask(master, "a", 1) for one in [do.untag_command(one)[1]])
    (refused,) = ask(master, "b", 0)
    number, inner = do.untag_command(refused)
    assert (number, inner.reason) == (0, "a brings the first parameters")
    master.on_event(0.0, on.ClusterLeft(cluster="a"))
    assert any(isinstance(one, do.StartPush) for one in ask(master, "b", 0))


def test_fragments_share_the_lines_and_no_ticket():
    """With two slots no more than two layers go at a time, whichever fragments they are of."""
    master = begun(3)
    for number in range(3):
        ask(master, "a", number)
    under_way = master.transfers
    assert len(under_way) == 2
    seen = []
    while under_way:
        way, transfer = under_way[0]
        seen.append((transfer.ticket, transfer.layer))
        assert transfer.ticket.number % 3 == master.layer_of(transfer) % 3
        for command in master.on_event(0.0, on.Moved(way=way, transfer=transfer)):
            fragment, inner = do.untag_command(command)
            if isinstance(inner, do.Move):
                assert fragment == inner.transfer.ticket.number % 3
                assert inner.way is Way.PUSH
        under_way = master.transfers
    assert len(seen) == len(set(seen)) == 6


def test_what_is_of_a_member_is_told_once_and_what_is_of_no_fragment_is_refused():
    master = begun()
    told = master.on_event(0.0, on.ClusterBeat(cluster="c"))
    assert [type(one) for one in told] == [do.RegisterAgain]
    with pytest.raises(ProtocolError, match="PullAsked is of fragment 2, but there are 2"):
        master.on_event(0.0, tag_event(2, on.PullAsked(cluster="a")))
    master.on_event(0.0, on.ShardLost(shard="s0", reason="test"))
    assert all(part.shards.away == ("s0",) for part in master.parts)
    assert untag_event(on.Ticked()) == (0, on.Ticked())


def test_the_limit_of_the_norm_is_of_the_whole():
    master = begun(4, clip_norm=3.0)
    limits = [part._settings.clip_norm for part in master.parts]
    assert math.hypot(*limits) == pytest.approx(3.0)
    assert begun(1, clip_norm=0.3).parts[0]._settings.clip_norm == 0.3
