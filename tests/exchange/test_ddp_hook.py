"""DDP with the hook equals the plain exchange in the same wire format."""

import copy
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from allstep.comm import Communicator, init
from allstep.errors import CheckpointError, UsageError
from allstep.exchange import ExchangePolicy, LocalSGD, Synchronous, attach, make_policy
from allstep.exchange.ddp_comm_hook import DDPCommHook, ddp_hook
from allstep.exchange.fsdp_comm_hook import fsdp_hook
from allstep.exchange.wires import PowerSGD, TopK, WireFormat
from tests.exchange.nets import assert_same, differs, mlp, states
from tests.helpers.processes import RemoteError, run_processes
from tests.helpers.ranks import run_ranks

BUCKET_MB = 200 / 2**20  # several buckets

Wrap = Callable[[nn.Module, Communicator], tuple[nn.Module, Callable[[], Iterator[object]]]]


@pytest.fixture(autouse=True)
def _no_active_ddp() -> Iterator[None]:
    """DDP notes for the compiler which model is in its forward; threads overwrite each other's."""
    yield
    DistributedDataParallel._active_ddp_module = None


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)


def train(start: nn.Module, batches: Tensor, wrap: Wrap) -> list[dict[str, Tensor]]:
    """Each worker's parameters; worker r trains on batches[:, r]."""
    return run_ranks(batches.shape[1], lambda comm: train_worker(comm, start, batches, wrap))


def train_worker(
    comm: Communicator, start: nn.Module, batches: Tensor, wrap: Wrap
) -> dict[str, Tensor]:
    model = copy.deepcopy(start).to(comm.device)
    wrapped, flush = wrap(model, comm)
    step = optimizer(model)
    for batch in batches[:, comm.rank].to(comm.device):
        step.zero_grad()
        wrapped(batch).square().mean().backward()
        step.step()
    for _ in flush():
        step.step()
    return states(model)


def with_hook(policy: ExchangePolicy, use_names: bool = True) -> Wrap:
    def wrap(
        model: nn.Module, comm: Communicator
    ) -> tuple[nn.Module, Callable[[], Iterator[object]]]:
        hook = ddp_hook(policy, comm)
        ddp = DistributedDataParallel(
            model, process_group=comm.process_group, bucket_cap_mb=BUCKET_MB
        )
        ddp.register_comm_hook(model if use_names else None, hook)
        return ddp, hook.flush

    return wrap


def with_exchange(policy: ExchangePolicy) -> Wrap:
    def wrap(
        model: nn.Module, comm: Communicator
    ) -> tuple[nn.Module, Callable[[], Iterator[object]]]:
        return model, attach(model, comm, policy).flush

    return wrap


def policy(wire: str | WireFormat, staleness: int = 0) -> ExchangePolicy:
    return make_policy(compression=wire, staleness=staleness, algorithm="native")


# How int8 rounds depends on the neighbours in a bucket, and DDP's lie in another order: hence a
# model of one matrix. The rounding of a sum of two in 16 bits doesn't depend on the order.
@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize(("wire", "size"), [("fp32", 4), ("fp16", 2), ("int8", 4)])
@pytest.mark.parametrize("use_names", [True, False])
def test_equals_the_exchange(wire: str, size: int, staleness: int, use_names: bool) -> None:
    start = mlp() if wire != "int8" else nn.Linear(5, 60, bias=False)
    batches = torch.randn(7, size, 3, 5)
    expected = train(start, batches, with_exchange(policy(wire, staleness)))
    actual = train(start, batches, with_hook(policy(wire, staleness), use_names))
    for mine in actual:
        assert_same(mine, expected[0])
    prompt = train(start, batches, with_exchange(policy("fp32")))
    if wire != "fp32" or staleness:
        assert differs(actual[0], prompt[0], by=1e-6)


@pytest.mark.parametrize("wire", ["fp16", "int8", PowerSGD(rank=1), TopK(fraction=0.3)])
def test_lossy_formats_train_alike_on_all_workers(wire: str | WireFormat) -> None:
    start, batches = mlp(), torch.randn(30, 3, 8, 5)
    prompt = train(start, batches, with_exchange(policy("fp32")))
    results = train(start, batches, with_hook(policy(wire)))
    for result in results:
        assert_same(result, results[0], rtol=0)
    assert differs(results[0], prompt[0], by=1e-6)
    loss = [_loss(start, model, batches) for model in (states(start), prompt[0], results[0])]
    assert loss[2] < loss[1] + 0.2 * (loss[0] - loss[1])


def _loss(start: nn.Module, state: dict[str, Tensor], batches: Tensor) -> float:
    model = copy.deepcopy(start)
    model.load_state_dict(state)
    with torch.no_grad():
        return float(model(batches.flatten(0, 2)).square().mean())


def test_first_stale_steps_make_no_update() -> None:
    def worker(comm: Communicator) -> list[bool]:
        model = mlp()
        ddp, _ = with_hook(policy("fp32", staleness=2))(model, comm)
        landed = []
        for _ in range(4):
            ddp(torch.ones(2, 5)).sum().backward()
            landed.append(all(p.grad is not None for p in model.parameters()))
            assert landed[-1] or all(p.grad is None for p in model.parameters())
            ddp.zero_grad()
        return landed

    assert run_ranks(2, worker) == [[False, False, True, True]] * 2


def test_sum() -> None:
    def worker(comm: Communicator) -> Tensor:
        model = nn.Linear(1, 1, bias=False)
        wrap = with_hook(Synchronous(reduction="sum", algorithm="native"))
        ddp, _ = wrap(model, comm)
        ddp(torch.full((1, 1), float(comm.rank))).sum().backward()
        return model.weight.grad

    assert [float(grad) for grad in run_ranks(3, worker)] == [3.0] * 3


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_overflow_names_the_parameter(ranks: tuple[int, ...]) -> None:
    def worker(comm: Communicator) -> str:
        model = nn.Sequential(nn.Linear(1, 1, bias=False))
        ddp, _ = with_hook(policy("fp16"))(model, comm)
        with pytest.raises(Exception, match=r"Parameter `0\.weight` has a gradient.* beyond 65504"):
            ddp(torch.full((1, 1), 1e6 if comm.rank in ranks else 1.0)).sum().backward()
        return "raised"

    assert run_ranks(2, worker) == ["raised"] * 2


def test_other_policies_are_an_error_on_all_workers() -> None:
    def worker(comm: Communicator) -> None:
        ddp, _ = with_hook(policy("int8" if comm.rank else "fp16"))(mlp(), comm)
        with pytest.raises(
            Exception, match=r"`compression` is Float16\(.*\) on rank 0; Int8\(.*\) on ra"
        ):
            ddp(torch.ones(2, 5)).sum().backward()

    run_ranks(2, worker, timeout_s=20)


@pytest.mark.parametrize(
    ("wire", "num_unsent"), [(policy(TopK(fraction=0.2)), 70), (policy("fp32", staleness=2), 0)]
)
def test_goes_on_after_a_checkpoint(wire: ExchangePolicy, num_unsent: int) -> None:
    """What was not sent yet is sent by the next process, what is under way arrives there."""
    start, batches = mlp(), torch.randn(12, 2, 3, 5)

    def halves(load: bool) -> Callable[[Communicator], dict[str, Tensor]]:
        def worker(comm: Communicator) -> dict[str, Tensor]:
            model, saved = copy.deepcopy(start), {}
            step = torch.optim.SGD(model.parameters(), 0.05)
            for half in batches[:, comm.rank].chunk(2):
                hook = ddp_hook(wire, comm)
                ddp = DistributedDataParallel(model, process_group=comm.process_group)
                ddp.register_comm_hook(model, hook)
                if load:
                    hook.load_state_dict(saved)
                for batch in half:
                    step.zero_grad()
                    ddp(batch).square().mean().backward()
                    step.step()
                saved = hook.state_dict()
                assert sum(map(len, saved["unsent"].values())) == num_unsent
            return states(model)

        return worker

    def whole(comm: Communicator) -> dict[str, Tensor]:
        model = copy.deepcopy(start)
        step = torch.optim.SGD(model.parameters(), 0.05)
        ddp = DistributedDataParallel(model, process_group=comm.process_group)
        ddp.register_comm_hook(model, ddp_hook(wire, comm))
        for batch in batches[:, comm.rank]:
            step.zero_grad()
            ddp(batch).square().mean().backward()
            step.step()
        return states(model)

    expected = run_ranks(2, whole)[0]
    assert_same(run_ranks(2, halves(load=True))[0], expected)
    assert differs(run_ranks(2, halves(load=False))[0], expected, by=1e-6)


class Either(nn.Module):
    """Parameters of which a step uses one."""

    def __init__(self, num_parts: int = 2, size: int = 1) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(size, 1, bias=False) for _ in range(num_parts)])

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.parts[number](x)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("finds_unused", [True, False])
def test_stale_gradient_of_a_parameter_unused_in_the_step(
    set_to_none: bool, finds_unused: bool
) -> None:
    def worker(comm: Communicator) -> tuple[list[float], list[bool]]:
        model = Either()
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        step = torch.optim.SGD(model.parameters(), 1.0)
        hook = ddp_hook(policy("fp32", staleness=1), comm)
        ddp: nn.Module = DistributedDataParallel(
            model, process_group=comm.process_group, find_unused_parameters=finds_unused
        )
        ddp.register_comm_hook(model, hook)
        had = []
        for number in range(8):
            step.zero_grad(set_to_none=set_to_none)
            x = torch.full((1, 1), -1.0 - comm.rank)
            if finds_unused:
                ddp(x, number % 2).sum().backward()
            else:
                sum(ddp(x, i) * (i == number % 2) for i in range(2)).sum().backward()
            had.append(model.parts[0].weight.grad is not None)
            step.step()
        for _ in hook.flush():
            step.step()
        return [p.item() for p in model.parameters()], had

    for values, had in run_ranks(2, worker):
        assert values == [6.0, 6.0]  # each four times, by 1.5
        if finds_unused and set_to_none:
            assert had[:4] == [False, True, False, True]  # in step 2 that of step 1 is due


@pytest.mark.parametrize("staleness", [1, 2])
def test_late_gradients_leave_alone_what_their_step_did_not_use(staleness: int) -> None:
    """Weight decay and momentum move what has a gradient, be it zero: plain DDP is the oracle."""
    start = Either(num_parts=3)

    def train_with(hooked: bool) -> Callable[[Communicator], dict[str, Tensor]]:
        def worker(comm: Communicator) -> dict[str, Tensor]:
            model, hook = copy.deepcopy(start), ddp_hook(policy("fp32", staleness), comm)
            ddp = DistributedDataParallel(
                model, process_group=comm.process_group, find_unused_parameters=True
            )
            if hooked:
                ddp.register_comm_hook(model, hook)
            step = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.5)
            for number in [0, 1, 1, 0, 0]:  # the last is never used
                step.zero_grad()
                # Gradients do not depend on the parameters, so that late ones are the same.
                ddp(torch.full((1, 1), 1.0 + comm.rank), number).sum().backward()
                step.step()
            for _ in hook.flush():
                step.step()
            return states(model)

        return worker

    expected = run_ranks(2, train_with(hooked=False))
    for found in run_ranks(2, train_with(hooked=True)):
        assert_same(found, expected[0])
        assert torch.equal(found["parts.2.weight"], start.parts[2].weight)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("as_views", [True, False])
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("wire", ["int8", TopK(fraction=0.1)])
def test_nothing_of_a_parameter_that_is_not_always_used_is_lost(
    wire: str | WireFormat, staleness: int, as_views: bool, set_to_none: bool
) -> None:
    """What the updates add up to, and what is still to be sent, are all gradients."""

    def worker(comm: Communicator) -> Tensor:
        model, hook = Either(num_parts=3, size=20).double(), ddp_hook(policy(wire, staleness), comm)
        ddp = DistributedDataParallel(
            model,
            process_group=comm.process_group,
            find_unused_parameters=True,
            gradient_as_bucket_view=as_views,
        )
        start = copy.deepcopy(model)
        ddp.register_comm_hook(model, hook)
        step, total = torch.optim.SGD(model.parameters(), 1.0), torch.zeros(())
        for number in range(40):
            step.zero_grad(set_to_none=set_to_none)
            x = torch.rand(1, 20, dtype=torch.float64)
            total = total + x.sum() / comm.size
            ddp(x, number % 2).sum().backward()
            step.step()
        for _ in hook.flush():
            step.step()
        unsent = sum(map(torch.sum, hook.state_dict()["unsent"].values()), torch.zeros(()))
        pairs = zip(start.parameters(), model.parameters(), strict=True)
        moved = [(before - p).detach().sum() for before, p in pairs]
        return torch.stack([total, unsent, sum(moved) / comm.size, moved[2].abs()])

    total, unsent, moved, of_unused = sum(run_ranks(2, worker)).tolist()
    assert moved + unsent == pytest.approx(total, rel=1e-9)
    assert of_unused == 0
    assert unsent != 0 or wire == "int8"


def test_a_checkpoint_of_another_policy_is_refused() -> None:
    def worker(comm: Communicator) -> None:
        hook = ddp_hook(policy("int8"), comm)
        model = mlp()
        ddp = DistributedDataParallel(model, process_group=comm.process_group)
        ddp.register_comm_hook(model, hook)
        ddp(torch.ones(2, 5)).sum().backward()
        state = hook.state_dict()
        hook.load_state_dict(state)
        state["policy"] = policy("fp16").state_dict()
        with pytest.raises(CheckpointError, match=r"`compression` \(=Int8\(.* was Float16\("):
            hook.load_state_dict(state)

    run_ranks(2, worker)


def test_counts_bytes_once_started() -> None:
    def worker(comm: Communicator) -> list[int]:
        model = nn.Linear(99, 1)
        hook = ddp_hook(policy("fp16"), comm)
        counts = [hook.sent_bytes]
        ddp = DistributedDataParallel(model, process_group=comm.process_group)
        ddp.register_comm_hook(None, hook)
        ddp(torch.ones(1, 99)).sum().backward()
        return [*counts, hook.sent_bytes]

    assert run_ranks(2, worker) == [[0, 200]] * 2
    assert isinstance(ddp_hook(), DDPCommHook)


def test_exact_sums_are_refused() -> None:
    message = r"`compression` \(=\"exact\"\) rounds .*`allstep.attach` with `allstep.steps`"
    with pytest.raises(UsageError, match=message):
        ddp_hook(policy("exact"))
    with pytest.raises(UsageError, match=message):
        fsdp_hook(mlp(), Communicator.single_process(), policy("exact"))


def test_local_sgd_is_refused() -> None:
    message = r"`policy` \(=LocalSGD\(.*\)\) averages parameters.*or use `allstep.attach`"
    with pytest.raises(UsageError, match=message):
        ddp_hook(LocalSGD(sync_every=4))
    with pytest.raises(UsageError, match=message):
        fsdp_hook(mlp(), Communicator.single_process(), LocalSGD(sync_every=4))


class TwoDtypes(nn.Module):
    """Parameters of two dtypes, which DDP puts into buckets of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.single, self.wide = nn.Linear(2, 2), nn.Linear(2, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.single(x).double())


def train_static_graph(
    comm: Communicator, make_model: Callable[[], nn.Module], staleness: int
) -> None:
    model = make_model()
    ddp = DistributedDataParallel(
        model, process_group=comm.process_group, static_graph=True, bucket_cap_mb=BUCKET_MB
    )
    ddp.register_comm_hook(model, ddp_hook(policy("fp32", staleness), comm))
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.ones(3, 2)).sum().backward()


@pytest.mark.process
def test_first_pass_of_a_static_graph_without_a_last_bucket() -> None:
    """It waited for ever. One bucket is the last, and prompt gradients need none."""
    with pytest.raises(RemoteError, match=r"UsageError: `static_graph` \(=True\) .*`steps` \(=1\)"):
        run_processes(2, train_static_graph, TwoDtypes, 1, timeout_s=60.0)
    run_processes(2, train_static_graph, partial(nn.Linear, 2, 1), 1)
    run_processes(2, train_static_graph, TwoDtypes, 0)


def gradients_in_groups(comm: Communicator) -> list[float]:
    groups = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 2), (1,))}
    (own,) = [group for ranks, group in groups.items() if comm.rank in ranks]

    def gradient(hook: DDPCommHook | None) -> float:
        model = nn.Linear(1, 1, bias=False)
        ddp = DistributedDataParallel(model, process_group=own)
        if hook is not None:
            ddp.register_comm_hook(model, hook)
        ddp(torch.full((1, 1), 2.0**comm.rank)).sum().backward()
        return model.weight.grad.item()

    message = r"`comm` is of the ranks \[0, 1, 2\], .* leave `comm` out"
    with pytest.raises(UsageError, match=message):
        gradient(ddp_hook(None, comm))
    of_group = init(process_group=own, device=comm.device)
    return [gradient(hook) for hook in (None, ddp_hook(), ddp_hook(None, of_group))]


@pytest.mark.process
def test_workers_are_those_of_the_process_group() -> None:
    """Plain DDP is the oracle; the mean over all would be 7 / 3."""
    expected = [[2.5] * 3, [2.0] * 3, [2.5] * 3]
    assert run_processes(3, gradients_in_groups) == expected


def hooked(model: nn.Module, hook: DDPCommHook) -> nn.Module:
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, hook)
    return ddp


def train_two_models(comm: Communicator) -> list[float]:
    """Two by turns, the first of which grows; gradients of the second where it has its own hook."""
    late = policy("fp32", staleness=1)
    first, second = nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1, bias=False)
    hook = ddp_hook(late)
    ddp = hooked(first, hook)
    ddp(torch.ones(1, 1)).sum().backward()
    with pytest.raises(UsageError, match=r"second model \(Linear\).* make a hook for each"):
        other = hooked(nn.Linear(1, 1, bias=False), hook)
        other(torch.ones(1, 1)).sum().backward()
    first.append(nn.Linear(1, 1))
    ddp = hooked(first, hook)
    others, found = hooked(second, ddp_hook(late)), []
    for step in range(3):
        for each, scale in ((ddp, 1.0), (others, 100.0)):
            each.zero_grad()
            each(torch.full((1, 1), scale * (step + 1))).sum().backward()
        found.append(0.0 if second.weight.grad is None else second.weight.grad.item())
    return found


@pytest.mark.process
def test_a_second_model_is_refused() -> None:
    """It got the late gradients of the first, if those were of the same names and sizes."""
    assert run_processes(2, train_two_models) == [[0.0, 100.0, 200.0]] * 2


def train_uneven(comm: Communicator, staleness: int, batches: list[int]) -> list[list[float]]:
    """Weights in plain DDP and with the hook, where workers have so many batches."""
    weights = []
    for hook in (None, ddp_hook(policy("fp32", staleness), comm)):
        model = nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        ddp = DistributedDataParallel(model)
        if hook is not None:
            ddp.register_comm_hook(None, hook)
        step = torch.optim.SGD(model.parameters(), 0.5)
        with ddp.join():
            for number in range(batches[comm.rank]):
                step.zero_grad()
                ddp(torch.full((1, 1), 1.0 + number)).sum().backward()
                step.step()
        weights.append(model.weight.flatten().tolist())
    return weights


@pytest.mark.process
@pytest.mark.parametrize("batches", [[2, 4], [0, 3]])
def test_workers_that_join_the_others_in_their_sums(batches: list[int]) -> None:
    for plain, mine in run_processes(2, train_uneven, 0, batches):
        assert mine == plain
    with pytest.raises(RemoteError, match=r"UsageError: `steps` \(=1\) of `Stale`.* `join\(\)`"):
        run_processes(2, train_uneven, 1, batches)


def test_arguments_of_a_wrong_type_are_named() -> None:
    comm = Communicator.single_process()
    pass_policy = (
        r"`policy` \(='int8'\) must be an ExchangePolicy: `allstep\.Synchronous\(compression="
    )
    with pytest.raises(UsageError, match=pass_policy):
        ddp_hook("int8")
    with pytest.raises(UsageError, match=pass_policy):
        fsdp_hook(mlp(), comm, "int8")
    with pytest.raises(
        UsageError, match=r"`comm` \(=3\) must be a Communicator: .*or leave it out"
    ):
        ddp_hook(None, 3)
    with pytest.raises(UsageError, match=r"`comm` \(=None\) must be a Communicator: .*replicate"):
        fsdp_hook(mlp(), None)
    with pytest.raises(UsageError, match=r"`model` \(=None\) must be a Module: .*fully_shard"):
        fsdp_hook(None, comm)


def test_sparse_gradient_is_named() -> None:
    def worker(comm: Communicator) -> None:
        model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
        ddp, _ = with_hook(policy("fp32"))(model, comm)
        with pytest.raises(UsageError, match=r"Parameter `0\.weight` has a sparse gradient"):
            ddp(torch.tensor([comm.rank])).sum().backward()

    run_ranks(2, worker)
