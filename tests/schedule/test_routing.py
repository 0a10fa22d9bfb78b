"""Every sample of every stage goes to exactly one replica of its neighbour."""

from spantrain.core.action import Direction
from spantrain.core.span import Coverage, Span, equal_spans
from spantrain.schedule.layout import Router


def uneven(make_plan):
    return make_plan(
        [
            (equal_spans(12, 3), [2.0, 1.0], [12, 12]),
            ((Span(0, 8), Span(8, 12)), [1.0, 3.0], [12, 12]),
            (equal_spans(12, 2), [1.0], [12]),
        ]
    )


def test_pieces_follow_the_micro_batches_of_the_receiver(make_plan) -> None:
    plan = uneven(make_plan)
    assert [str(s) for s in plan.stages[1].replica_spans(0)] == ["[0:2]", "[8:9]"]
    assert Router(plan).destinations(0, Direction.FORWARD, Span(0, 2)) == (("s1r0", Span(0, 2)),)
    assert Router(plan).destinations(1, Direction.FORWARD, Span(2, 8)) == (
        ("s2r0", Span(2, 4)),
        ("s2r0", Span(4, 6)),
        ("s2r0", Span(6, 8)),
    )
    assert Router(plan).destinations(1, Direction.BACKWARD, Span(2, 8)) == (
        ("s0r1", Span(2, 3)),
        ("s0r0", Span(3, 5)),
        ("s0r1", Span(5, 6)),
        ("s0r0", Span(6, 8)),
    )


def test_the_ends_send_nowhere(make_plan) -> None:
    plan = uneven(make_plan)
    assert Router(plan).destinations(2, Direction.FORWARD, Span(0, 2)) == ()
    assert Router(plan).destinations(0, Direction.BACKWARD, Span(0, 2)) == ()
    assert Router(plan).sources(0, Direction.FORWARD, Span(0, 2)) == ()


def test_every_sample_is_sent_once_and_sources_agree_with_destinations(make_plan) -> None:
    plan = uneven(make_plan)
    router = Router(plan)
    for direction in Direction:
        sent, expected = set(), set()
        crossed = {stage: Coverage() for stage in range(3)}
        for index, stage in enumerate(plan.stages):
            for number, replica in enumerate(stage.replicas):
                device = replica.devices[0]
                for span in stage.replica_spans(number):
                    for target, piece in router.destinations(index, direction, span):
                        sent.add((device, target, piece))
                        crossed[index].add(piece)
                    expected |= {(source, device, piece) for source, piece in router.sources(index, direction, span)}
        assert sent == expected
        assert sorted(coverage.total for coverage in crossed.values()) == [0, 12, 12]
