"""Random programs of a training on workers, against one process with whole batches."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from allstep import Stale, Synchronous
from tests.exchange.programs import NUM_BATCHES, ROWS, Program, check

POLICIES = [
    Synchronous(plain=True),
    Synchronous(algorithm="native"),
    Synchronous(algorithm="native", bucket_bytes=64),
    Synchronous(algorithm="ring", overlap=False),
    Synchronous(algorithm="native", reduction="sum"),
    Synchronous(plain=True, reduction="sum"),
    Synchronous(algorithm="native", compression="exact", bucket_bytes=64),
    Stale(algorithm="native", bucket_bytes=64),
    Stale(algorithm="native", reduction="sum"),
    Stale(steps=2, algorithm="recursive_doubling"),
    Stale(algorithm="native", compression="exact"),
]
SIZES = st.sampled_from([1, 2, 3, 4])


class Training(RuleBasedStateMachine):
    """Each rule adds to a program, which is run at the end."""

    num_run = 0
    program: Program | None = None

    @initialize(policy=st.sampled_from(POLICIES), in_steps=st.booleans(), size=SIZES)
    def begin(self, policy, in_steps, size):
        self.program = Program(policy, in_steps, [(size, [])])
        self.trained = {0: True, 1: True}
        self.num_batches = 0

    def add(self, name, **args):
        self.program.segments[-1][1].append((name, args))

    @precondition(lambda self: self.num_batches < NUM_BATCHES - 2)
    @rule(
        skipped=st.integers(0, 3),
        num_skipping=st.integers(0, ROWS),
        in_parts=st.booleans(),
        cuts=st.lists(st.integers(0, ROWS), min_size=3, max_size=3),
        passes=st.sampled_from([1, 1, 2]),
    )
    def train(self, passes, **args):
        program = self.program
        if program.in_steps or program.policy.staleness:
            passes = 1  # one update for several exchanges is for a loop of one's own
        self.num_batches += passes
        self.add("train", passes=passes, **args)

    @rule(layer=st.integers(0, 3), trained=st.booleans())
    def set_trained(self, layer, trained):
        layer %= len(self.trained)
        if self.trained[layer] != trained:
            self.trained[layer] = trained
            self.add("set_trained", layer=layer, trained=trained)

    @precondition(lambda self: len(self.trained) < 4)
    @rule()
    def append(self):
        self.trained[len(self.trained)] = True
        self.add("append")

    @rule()
    def flush(self):
        self.add("flush")

    @rule()
    def attach_again(self):
        self.add("attach_again")

    @rule()
    def evaluate(self):
        self.add("evaluate")

    @rule(number=st.integers(0, 9))
    def talk(self, number):
        self.add("talk", number=number)

    @rule()
    def save(self):
        self.add("state")

    @rule(size=SIZES)
    def load(self, size):
        self.program.segments.append((size, []))

    def teardown(self):
        if self.program is not None:
            check(self.program)
            Training.num_run += 1


def run(num_programs):
    run_state_machine_as_test(
        Training, settings=settings(max_examples=num_programs, stateful_step_count=20)
    )


def test_some_programs():
    run(10)


@pytest.mark.slow
def test_many_programs():
    run(100)


TRAIN = ("train", {"skipped": 0, "num_skipping": 5, "in_parts": False, "cuts": [3, 3, 9]})
FREEZE = ("set_trained", {"layer": 0, "trained": False})
UNFREEZE = ("set_trained", {"layer": 0, "trained": True})
APPEND = ("append", {})


@pytest.mark.parametrize("policy", [Synchronous(algorithm="native"), Stale(algorithm="native")])
@pytest.mark.parametrize("changes", [[APPEND], [FREEZE], [TRAIN, FREEZE], [TRAIN, FREEZE, APPEND]])
def test_a_checkpoint_right_after_the_model_changed(policy, changes):
    for sizes in ((2, 3), (3, 1), (1, 2)):
        before, after = sizes
        segments = [(before, changes), (after, [TRAIN, UNFREEZE, TRAIN, ("flush", {})])]
        check(Program(policy, in_steps=True, segments=segments))


@pytest.mark.parametrize("policy", [Synchronous(plain=True), Stale(algorithm="native")])
def test_an_evaluation_right_after_a_layer_joined(policy):
    check(Program(policy, in_steps=False, segments=[(2, [APPEND, ("evaluate", {}), TRAIN])]))
