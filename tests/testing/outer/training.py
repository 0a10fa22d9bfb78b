"""A made-up world of clusters, shards and a master that have parameters, and ways to let it train."""

from typing import Any

from testing.outer.policy import MadeUpWorld, without_clip

EVERY_SAMPLE = {(0, chunk, sample) for chunk in range(4) for sample in range(3)}
"""Of the data that a world has, unless it is told another size."""


def seeded_world(clusters: int = 2, shards: int = 2, *, samples: int = 12, chunks: int = 4, **more: Any) -> MadeUpWorld:
    made = MadeUpWorld(clusters, shards, settings=without_clip(**more), samples=samples, chunks=chunks)
    made.settle()
    push_all(made, "c0")
    made.settle()
    assert made.whole.state.seeded
    return made


def say(made: MadeUpWorld, name: str, events: Any) -> None:
    made.lines[f"up {name}"].extend(events)


def learn(made: MadeUpWorld, *names: str) -> None:
    """Let clusters train on a few samples each."""
    for name in names * 2:
        say(made, name, made.clusters[name].train())
        made.settle()


def push_all(made: MadeUpWorld, name: str) -> None:
    """Let a cluster ask for a push of each fragment of which it has something."""
    for number in range(made.fragments):
        say(made, name, made.clusters[name].ask(number))


def train_to_the_end(made: MadeUpWorld) -> None:
    for _ in range(200):
        for name, cluster in made.clusters.items():
            if name not in made.down:
                say(made, name, cluster.train())
                made.settle()
                push_all(made, name)
        made.settle()
        made.pass_time(2.0)
        made.settle()
        made.check()
        if made.master.state.chunks and not any(c.learned for c in made.clusters.values()) and counted(made) >= 12:
            return
    raise AssertionError("training did not end")


def counted(made: MadeUpWorld) -> int:
    assert made.master.state.chunks
    return made.master.state.chunks.counted


def last_window(made: MadeUpWorld) -> set[str]:
    return {verdict.cluster for verdict in made.master.updates.last.verdicts}
