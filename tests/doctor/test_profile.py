"""What is found out about a user's script, run here for its first steps."""

from textwrap import dedent

import pytest
import torch
from torch import nn

from allstep.doctor.profile import profile_script, read_profile
from allstep.errors import UsageError
from allstep.plan import Cluster, Link, PolicySpec, predict

# Each script defines `model`, of float32 unless it says otherwise, and what a step does.
BEGIN = """
    import copy
    import sys
    from collections import OrderedDict
    from dataclasses import dataclass

    import torch
    from torch import nn

    import allstep
    from allstep import attach

    comm = allstep.init(device="cpu")
    torch.manual_seed(0)
"""
LOOP = """
    exchange = attach(model, comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(12):
        step()
        optimizer.step()
        optimizer.zero_grad()
    raise AssertionError("goes on after enough steps")
"""


@pytest.fixture
def profiled(tmp_path):
    """Runs a script made of parts, and returns what was found or raises what was said."""

    def run(*parts, arguments=()):
        script, result = tmp_path / "train.py", tmp_path / "profile.json"
        result.unlink(missing_ok=True)
        script.write_text("\n".join(dedent(part) for part in (BEGIN, *parts)))
        profile_script(script, arguments, result, timeout_s=100.0)
        return read_profile(result, script)

    return run


# -- micro-batches ---------------------------------------------------------------------------------

ACCUMULATES = """
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    other = nn.Linear(2, 2)
    others = torch.optim.SGD(other.parameters(), lr=0.1)

    def step():
        with exchange.no_sync():
            model(torch.ones(4, 8)).mean().backward()
        model(torch.ones(4, 8)).mean().backward()
        other(torch.ones(3, 2)).mean().backward()  # nobody attached it
        others.step()
"""


def test_profile_tells_micro_batches_from_steps(profiled):
    """Gradients of two of four samples are added up before each exchange."""
    found = profiled(ACCUMULATES, LOOP)
    assert (found.micro.num_samples, found.num_micro_batches) == (4, 2)
    assert found.global_batch is None
    assert found.micro.num_params == 128 + 16 + 32 + 2
    assert {*found.micro.gradients[:2]} == {32, 2}  # the last layer's come first
    assert found.micro.forward_s > 0 and found.micro.backward_s > 0 and found.micro.optimizer_s > 0


def test_profile_spec_accumulates_as_much_on_any_number_of_workers(profiled):
    found = profiled(ACCUMULATES, LOOP)
    spec = found.spec()
    assert [spec.batch(n) for n in (1, 3)] == [8, 24]
    both_s = 2 * (found.micro.forward_s + found.micro.backward_s) + found.micro.optimizer_s
    assert spec.workload(3).compute_s == pytest.approx(both_s)
    assert [found.spec(16).num_micro_batches(n) for n in (1, 2, 3, 4, 9)] == [4, 2, 2, 1, 1]
    with pytest.raises(UsageError, match=r"`global_batch` \(=18\) must be a multiple of"):
        found.spec(18)


STEPS = """
    model = nn.Linear(8, 2)
    exchange = attach(model, comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = torch.utils.data.TensorDataset(torch.ones(65, 8))
    loader = allstep.data.loader(samples, comm, global_batch=12, micro_batch=4)
    for _ in range(3):  # of five whole global batches, and one of two micro-batches
        for batch in allstep.steps(loader, exchange):
            for (x,) in batch:
                batch.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
"""


def test_profile_of_steps_has_a_fixed_global_batch(profiled):
    found = profiled(STEPS)
    assert (found.micro.num_samples, found.num_micro_batches) == (4, 3)
    assert found.global_batch == 12
    assert found.spec(24).batch(5) == 24


def test_profile_spec_leaves_workers_beyond_the_micro_batches_idle(profiled):
    """The planner's own rule, which a batch taken for one micro-batch would escape."""
    link = Link(bandwidth_bps=1e15)
    cluster = Cluster(name="", num_nodes=9, workers_per_node=1, intra=link, inter=link)
    policy = PolicySpec(name="fp32", algorithm="ring", bucket_bytes=None)

    def speed_ups(job):
        return [p.speed_up for p in predict(job, cluster, [policy], [1, 3, 9])]

    found = profiled(STEPS)
    one, three, nine = speed_ups(found.spec())
    assert one == pytest.approx(1.0)
    assert nine == pytest.approx(three, rel=1e-3)
    assert nine <= 3.01
    growing = speed_ups(profiled(ACCUMULATES, LOOP).spec())
    assert growing[2] > 8


@pytest.mark.parametrize(
    ("told", "global_batch"), [(8, 8), (64, 64), (4, None), (6, None), (None, None)]
)
def test_profile_takes_the_global_batch_of_attach(profiled, told, global_batch):
    """Four samples at once may be all that a single worker has of four, and say nothing of six."""
    loop = LOOP.replace("attach(model, comm)", f"attach(model, comm, global_batch={told})")
    assert profiled(ACCUMULATES, loop).global_batch == global_batch


# -- gradients -------------------------------------------------------------------------------------

TWO_HEADS = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(20, 100)
            self.heads = nn.ModuleList(nn.Linear(100, n) for n in (2, 3))
            self.never = nn.Linear(7, 7)

        def forward(self, x):
            hidden = self.body(x).relu()
            return (hidden, *(head(hidden) for head in self.heads))

    model = Net()
"""
TOGETHER = """
    def step():
        hidden, *outputs = model(torch.ones(5, 20))
        (hidden.mean() + sum(output.mean() for output in outputs)).backward()
"""
ONE_BY_ONE = """
    def step():
        _, first, second = model(torch.ones(5, 20))
        with exchange.no_sync():
            first.mean().backward(retain_graph=True)
        second.mean().backward()
"""


@pytest.mark.parametrize("step", [TOGETHER, ONE_BY_ONE])
def test_profile_counts_every_gradient_once(profiled, step):
    """That of each output, of an earlier pass, and of what no pass reaches: all of them travel."""
    found = profiled(TWO_HEADS, step, LOOP)
    sizes = [2000, 100, 200, 2, 300, 3, 49, 7]
    assert sorted(found.micro.gradients) == sorted(sizes)
    assert found.micro.num_params == sum(sizes)
    assert {*found.micro.gradients[-2:]} == {49, 7}  # at the end, for nobody knows before
    assert (found.micro.num_samples, found.num_micro_batches) == (5, 1)


def test_profile_of_gradients_from_an_earlier_pass(profiled):
    found = profiled(TWO_HEADS, ONE_BY_ONE, LOOP)
    assert {*found.micro.gradients[:2]} == {200, 2}
    assert found.micro.ready[2][1] == 0.0


@pytest.mark.parametrize(
    ("dtype", "element_bytes"), [("float32", 4), ("bfloat16", 2), ("float64", 8)]
)
def test_profile_of_gradients_in_the_models_dtype(profiled, dtype, element_bytes):
    found = profiled(
        f"""
        model = nn.Linear(8, 2, dtype=torch.{dtype})

        def step():
            model(torch.ones(4, 8, dtype=torch.{dtype})).mean().backward()
        """,
        LOOP,
    )
    assert found.micro.element_bytes == element_bytes


# -- what goes in and comes out --------------------------------------------------------------------


NET = """
    class Output(OrderedDict):  # torch's trees have not been told of it
        pass

    @dataclass
    class Both:
        logits: torch.Tensor
        name: str = "both"

    @dataclass
    class Registered:
        logits: torch.Tensor

    torch.utils._pytree.register_pytree_node(
        Registered, lambda out: ([out.logits], None), lambda values, _: Registered(*values)
    )

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, *args, **options):
            (x,) = [*args, *options.values()]
            x = x["x"] if isinstance(x, dict) else x
            return make(self.layer(x))

    model = Net()
"""


@pytest.mark.parametrize(
    ("make", "take"),
    [
        ("lambda y: y", "out"),
        ("lambda y: (y, None)", "out[0]"),
        ("lambda y: [y, {'n': 3}]", "out[0]"),
        ("lambda y: {'logits': y, 'loss': y.mean()}", "out['loss']"),
        ("lambda y: Output(logits=y)", "out['logits']"),
        ("lambda y: Both(y)", "out.logits"),
        ("lambda y: Registered(y)", "out.logits"),
    ],
)
@pytest.mark.parametrize("given", ["x", "{'x': x}", "inputs=x", "inputs={'x': x}"])
def test_profile_finds_tensors_in_inputs_and_outputs(profiled, make, take, given):
    found = profiled(
        f"make = {make}",
        NET,
        f"""
        def step():
            x = torch.ones(6, 3)
            out = model({given})
            {take}.mean().backward()
        """,
        LOOP,
    )
    assert (found.micro.num_samples, found.micro.num_params) == (6, 8)


def test_profile_of_a_lazy_model_and_its_copies(profiled):
    """A moving average is a copy of an attached model, hooks and all; it isn't watched."""
    found = profiled(
        """
        model = nn.Sequential(nn.LazyLinear(5), nn.LazyLinear(2))

        def step():
            model(torch.ones(4, 3)).mean().backward()
            average = copy.deepcopy(model)
            average(torch.ones(9, 3)).mean().backward()
        """,
        LOOP.replace("optimizer =", "model(torch.ones(1, 3)); optimizer ="),
    )
    assert (found.micro.num_params, found.micro.num_samples) == (32, 4)


# -- scripts of which nothing can be said ----------------------------------------------------------

PLAIN = """
    model = nn.Linear(8, 2)

    def step():
        model(torch.ones(4, 8)).mean().backward()
"""


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((), r"`script` \(=.*train.py\) never calls `allstep.attach`"),
        ((PLAIN, LOOP.replace("12", "5").replace("raise", "raise SystemExit #")), "after 5 steps"),
        ((PLAIN, LOOP.replace("12", "0").replace("raise", "sys.exit() #")), "after 0 steps"),
        (
            (PLAIN.replace("model(", "nn.functional.linear(model.weight, "), LOOP),
            r"made 11 steps, but no backward pass of the attached model was seen: call the model",
        ),
    ],
)
def test_profile_refuses_scripts_that_train_no_attached_model(profiled, parts, message):
    with pytest.raises(UsageError, match=message):
        profiled(*parts)


def test_profile_quotes_a_script_that_fails(profiled):
    with pytest.raises(UsageError, match=r"`script` \(=.*train.py\) failed:\n(.*\n)+.*division by"):
        profiled("1 / 0")
    with pytest.raises(UsageError, match=r"`script` \(=.*train.py\) exited with 3\."):
        profiled("sys.exit(3)")


def test_profiled_script_gets_its_own_arguments(profiled):
    with pytest.raises(UsageError, match="exited with --epochs 3 -- x"):
        profiled("sys.exit(' '.join(sys.argv[1:]))", arguments=["--epochs", "3", "--", "x"])


def test_profile_leaves_no_hooks(profiled):
    """Neither in the place of `attach` nor on other optimizers."""
    import allstep.exchange

    attach = allstep.exchange.attach
    profiled(PLAIN, LOOP)
    assert allstep.exchange.attach is attach
    model = nn.Linear(1, 1)
    for _ in range(30):
        torch.optim.SGD(model.parameters()).step()
