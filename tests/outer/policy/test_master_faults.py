"""The protocol as a state machine, of models in one to three fragments: any faults at any moment, then a quiet end."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from testing.outer.members import samples_of
from testing.outer.policy import MadeUpWorld, without_clip
from testing.outer.training import EVERY_SAMPLE, push_all, say, train_to_the_end

CLUSTERS, SHARDS = ["c0", "c1", "c2"], ["s0", "s1"]
names = st.sampled_from(CLUSTERS + SHARDS)


class Faults(RuleBasedStateMachine):
    """Messages arrive in any order over lines; anything dies, comes back or loses its connection at any moment.

    What is looked for: nothing is lost, doubled or mixed. Shards assert that no lesson is twice in what they add up; a
    sample is not twice in the first fragment, which counts data. In others another may learn it again, where the first
    fragment's push of a cluster that died was not counted.
    """

    @initialize(
        fragments=st.integers(1, 3), spoiled=st.sampled_from(["", "", "c0", "c2"]), begun=st.sampled_from([2, 1, 0])
    )
    def begin(self, fragments, spoiled, begun):
        """Begin at the very start, when all are connected, or when all have the first version."""
        self.made = MadeUpWorld(3, 2, settings=without_clip(fragments=fragments), samples=12, chunks=4)
        self.died = set()
        if begun:
            self.made.settle()
        if begun > 1:
            self.all_train_and_push()
        if spoiled:
            self.made.clusters[spoiled].spoiled = True

    @rule(name=st.sampled_from(CLUSTERS), samples=st.integers(1, 3), number=st.integers(0, 2), ends_round=st.booleans())
    def trains_and_asks(self, name, samples, number, ends_round):
        if name in self.made.down:
            return
        cluster = self.made.clusters[name]
        for _ in range(samples):
            say(self.made, name, cluster.train())
        say(self.made, name, cluster.ask(number % self.made.fragments, ends_round=ends_round))

    @rule()
    def all_train_and_push(self):
        for name in sorted({*CLUSTERS} - self.made.down):
            say(self.made, name, self.made.clusters[name].train())
            push_all(self.made, name)
        self.made.settle()
        self.made.pass_time(1.0)

    @rule(picks=st.lists(st.integers(0, 9), min_size=5, max_size=40))
    def messages_arrive(self, picks):
        for pick in picks:
            busy = self.made.busy_lines
            if busy:
                self.made.deliver(busy[pick % len(busy)])

    @rule()
    def all_messages_arrive(self):
        self.made.settle()

    @rule(but=names)
    def all_messages_arrive_but_on_one_line(self, but):
        while busy := [line for line in self.made.busy_lines if line not in (but, f"up {but}")]:
            self.made.deliver(busy[0])

    @rule(name=names)
    def dies_or_comes_back(self, name):
        if name in self.made.down:
            self.made.revive(name)
        else:
            self.died.add(name)
            self.made.kill(name)

    @rule(name=names)
    def loses_its_connection(self, name):
        self.made.connect(name)

    @rule(name=st.sampled_from(SHARDS))
    def writes_a_snapshot(self, name):
        if name not in self.made.down:
            self.made.snapshot(name)

    @rule()
    def the_master_dies(self):
        self.made.start_master()

    @rule(seconds=st.sampled_from([1.0, 12.0]))
    def time_passes(self, seconds):
        self.made.pass_time(seconds)

    @invariant()
    def nothing_is_mixed(self):
        self.made.check()

    def teardown(self):
        """Let all come back, and train to the end of the data."""
        for name in sorted(self.made.down):
            self.made.revive(name)
        self.made.settle()
        self.made.pass_time(30.0)
        if not self.made.whole.state.seeded:
            # Only who is spoiled might have something to bring.
            for cluster in self.made.clusters.values():
                cluster.spoiled = False
        train_to_the_end(self.made)
        for number in range(self.made.fragments):
            self.check_end(number)

    def check_end(self, number):
        """Look at the newest version of a fragment: what it learned, and what the master counted."""
        made, learned = self.made, self.made.lessons(number)
        assert samples_of(learned) <= EVERY_SAMPLE
        if made.lost_work:
            return
        has = samples_of(learned | made.left_out_of[number])
        if number == 0 or not self.died & {*CLUSTERS}:
            assert has == EVERY_SAMPLE
        if not made.left_out_of[number]:
            tokens = sum(one.tokens for one in made.whole.state.fragments[number].clusters.values())
            assert tokens == len(learned), "what counts is what was learned"


TestFaults = Faults.TestCase
TestFaults.settings = settings(deadline=None, max_examples=30, stateful_step_count=40)
