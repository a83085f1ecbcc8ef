"""Batch norm over groups of samples is that of one process on the same samples."""

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import allstep
from allstep import Communicator, TrainOptions
from allstep.errors import UsageError
from allstep.exchange import attach
from allstep.nn import convert_batch_norm, keep_last_statistics, precise_batch_norm
from tests.helpers import same_model
from tests.helpers.compare import state_difference
from tests.helpers.processes import run_processes
from tests.helpers.ranks import run_ranks

TOLERANCE = 1e-10
Result = dict[str, Tensor]


def make_net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        )
        for parameter in net.parameters():
            nn.init.normal_(parameter)
    return net.double()


NET = make_net()


def images(num_samples: int, seed: int = 1) -> Tensor:
    """Drifting, so that every group has other statistics."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, 2, 6, 6, generator=generator, dtype=torch.float64)
    return x * torch.linspace(1, 3, num_samples, dtype=torch.float64).view(-1, 1, 1, 1) + 5


def loss_of(y: Tensor) -> Tensor:
    """A sum over samples, not symmetric in them."""
    weights = torch.linspace(-1, 2, y.shape[1:].numel(), dtype=y.dtype).view(y.shape[1:])
    return (y.sin() * weights).sum()


def one_process(x: Tensor, groups: Sequence[int]) -> tuple[Tensor, Tensor, Result]:
    """torch's batch norm, called group by group; gradients are summed over the groups.

    Returns y, the gradient of x, and each parameter's gradient and buffer.
    """
    x = x.clone().requires_grad_()
    ys, buffers = [], []
    net = copy.deepcopy(NET)
    for group in x.split(groups):
        copied = copy.deepcopy(NET)
        for mine, shared in zip(copied.modules(), net.modules(), strict=True):
            mine._parameters = shared._parameters
        ys.append(copied(group))
        buffers.append(dict(copied.named_buffers()))
    loss_of(torch.cat(ys)).backward()
    assert x.grad is not None
    found = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    for name in buffers[0]:
        parts = [n * b[name] for n, b in zip(groups, buffers, strict=True)]
        found[name] = sum(parts[1:], parts[0]) / len(x)
    return torch.cat(ys).detach(), x.grad, found


def several_workers(
    x: Tensor, shares: Sequence[int], convert: Callable[[nn.Module, Communicator], nn.Module]
) -> tuple[Tensor, Tensor, list[Result]]:
    """One call on each worker; parameters' gradients are summed over the workers."""

    def work(comm: Communicator) -> tuple[Tensor, Tensor, Result]:
        net = convert(copy.deepcopy(NET), comm)
        part = x.split(list(shares))[comm.rank].clone().requires_grad_()
        y = net(part)
        loss_of(y).backward()
        assert part.grad is not None
        found = dict(net.named_buffers())
        for name, p in net.named_parameters():
            assert p.grad is not None
            found[name] = comm.all_reduce(p.grad)
        return y.detach(), part.grad, found

    results = run_ranks(len(shares), work)
    ys, grads, found = zip(*results, strict=True)
    return torch.cat(ys), torch.cat(grads), list(found)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    scale = max(1.0, float(expected.abs().max()))
    assert float((actual - expected).abs().max()) < TOLERANCE * scale


@pytest.mark.parametrize("shares", [(4, 4), (4, 3), (4, 0), (1, 4), (4, 4, 4), (4, 0, 1)])
def test_group_across_workers_is_whole_batch_norm(shares: tuple[int, ...]) -> None:
    size = len(shares)

    def convert(net: nn.Module, comm: Communicator) -> nn.Module:
        return convert_batch_norm(net, comm, 4 * size, micro_batch=4, global_batch=4 * size)

    x = images(sum(shares))
    y, grad, expected = one_process(x, [len(x)])
    found_y, found_grad, found = several_workers(x, shares, convert)
    assert_near(found_y, y)
    assert_near(found_grad, grad)
    for result in found:
        for name, value in expected.items():
            assert_near(result[name], value)

    if 1 not in shares and 0 not in shares:  # the control: each worker's own statistics
        plain_y, _, _ = several_workers(x, shares, lambda net, comm: net)
        assert float((plain_y - y).abs().max()) > 0.1


def test_two_groups_across_four_workers() -> None:
    x = images(4 * 4)
    y, grad, expected = one_process(x, [8, 8])
    found_y, found_grad, found = several_workers(
        x,
        [4] * 4,
        lambda net, comm: convert_batch_norm(net, comm, 8, micro_batch=4, global_batch=16),
    )
    assert_near(found_y, y)
    assert_near(found_grad, grad)
    for name, value in expected.items():
        is_statistic = "running" in name or "num_batches" in name
        total = sum(r[name] for r in found) / 4 if is_statistic else found[0][name]
        assert_near(total, value)


@pytest.mark.parametrize("num_samples", [12, 10, 9, 3])
def test_ghost_groups_within_a_micro_batch(num_samples: int) -> None:
    x = images(num_samples)
    groups = [len(group) for group in x.split(4)]
    y, grad, expected = one_process(x, groups)
    found_y, found_grad, (found,) = several_workers(
        x, [num_samples], lambda net, comm: convert_batch_norm(net, comm, 4, micro_batch=12)
    )
    assert_near(found_y, y)
    assert_near(found_grad, grad)
    for name, value in expected.items():
        assert_near(found[name], value)
    if len(groups) > 1:
        plain_y, _, _ = one_process(x, [num_samples])
        assert float((plain_y - y).abs().max()) > 0.1


def trained(
    comm: Communicator, micro_batch: int, group_size: int | None, batches: Sequence[Tensor]
) -> Result:
    """Some steps with the exchange's running statistics."""
    model: nn.Module = copy.deepcopy(NET)
    if group_size is not None:
        convert_batch_norm(
            model, comm, group_size, micro_batch=micro_batch, global_batch=len(batches[0])
        )
    exchange = attach(model, comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for batch in batches:
        parts = batch.split(micro_batch)
        local = parts[
            comm.rank * len(parts) // comm.size : (comm.rank + 1) * len(parts) // comm.size
        ]
        with exchange.statistics.step():
            for i, part in enumerate(local, 1):
                share = comm.size * len(part) / len(batch)
                is_last = i == len(local)
                context = contextlib.nullcontext() if is_last else exchange.no_sync()
                with context, exchange.statistics.micro_batch(share / comm.size):
                    (loss_of(model(part)) / len(part) * share).backward()
        if not local:
            exchange.synchronize()
        optimizer.step()
        optimizer.zero_grad()
    exchange.sync_buffers()
    return model.state_dict()


def test_training_is_the_same_on_any_number_of_workers() -> None:
    batches = [images(n, seed=i) for i, n in enumerate((16, 16, 15))]  # the last group is short
    expected = trained(Communicator.single_process(), 8, None, batches)
    for size, micro_batch in ((1, 16), (2, 16), (4, 4), (2, 8)):
        for found in run_ranks(size, lambda comm, m=micro_batch: trained(comm, m, 8, batches)):
            for name, value in expected.items():
                if "num_batches" not in name:
                    assert_near(found[name], value)
    (plain, *_) = run_ranks(4, lambda comm: trained(comm, 4, None, batches))
    assert float((plain["4.running_mean"] - expected["4.running_mean"]).abs().max()) > 1e-3


def trained_in_one_group(comm: Communicator) -> Result:
    return trained(comm, 16 // comm.size, 16, [images(n, seed=n) for n in (16, 15)])


@pytest.mark.process
def test_group_across_processes() -> None:
    """Beside the exchange, which is under way in the same backward pass."""
    expected = trained_in_one_group(Communicator.single_process())
    for found in run_processes(2, trained_in_one_group, timeout_s=60):
        assert state_difference(found, expected) < TOLERANCE


def test_fit_with_groups_across_workers(tmp_path: Path) -> None:
    """Among others, what `fit` measures on one worker alone must not wait for its peers."""

    def train(comm: Communicator) -> Result:
        task = same_model.make_task("sgd", augment=False)
        micro_batch = 96 // comm.size
        for module in task.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if comm.size > 1:
            convert_batch_norm(task.model, comm, 96, micro_batch=micro_batch, global_batch=96)
        options = TrainOptions(
            epochs=1,
            global_batch=96,
            micro_batch=micro_batch,
            drop_last=True,
            precision="float64",
        )
        allstep.fit(task, options, comm, tmp_path / str(comm.size))
        return task.model.state_dict()

    (expected,) = run_ranks(1, train)
    for found in run_ranks(2, train):
        assert state_difference(found, expected) < TOLERANCE


def test_convert_keeps_parameters_settings_and_shared_modules() -> None:
    norm = nn.BatchNorm1d(3, eps=0.1, momentum=None, affine=False)
    net = nn.ModuleList([norm, nn.Sequential(norm), nn.BatchNorm1d(2, track_running_stats=False)])
    net[2].eval()
    state = {name: tensor.data_ptr() for name, tensor in net.state_dict().items()}
    converted = convert_batch_norm(net, Communicator.single_process(), 2, micro_batch=4)
    assert converted is net
    assert net[0] is net[1][0]
    assert (net[0].eps, net[0].momentum, net[0].weight) == (0.1, None, None)
    assert not net[2].training
    assert {name: tensor.data_ptr() for name, tensor in net.state_dict().items()} == state
    assert "group_size=2" in repr(net[0])

    x = torch.randn(4, 3)
    for part in (x, 2 * x):  # without momentum: the mean over all calls
        net[0](part)
    assert net[0].num_batches_tracked == 2
    torch.testing.assert_close(net[0].running_mean, 1.5 * x.mean(0))
    torch.testing.assert_close(net[2](x[:, :2]).mean(0), torch.zeros(2))  # those of the call


def test_eval_without_running_statistics_uses_the_batch() -> None:
    net = nn.BatchNorm1d(3, affine=False, track_running_stats=False).double()
    ours = convert_batch_norm(copy.deepcopy(net), Communicator.single_process(), 4, micro_batch=8)
    x = images(12).flatten(1)[:, :3]
    expected = torch.cat([net(group) for group in x.split(4)])
    assert_near(ours.train()(x[:8]), expected[:8])
    assert_near(ours.eval()(x), expected)  # also of more samples than a micro-batch
    assert ours(x[:1]).isfinite().all()


def test_track_running_stats_off() -> None:
    net = nn.BatchNorm1d(3)
    net.track_running_stats = False
    ours = convert_batch_norm(copy.deepcopy(net), Communicator.single_process(), 4, micro_batch=4)
    x = images(4).flatten(1)[:, :3].float()
    for norm in (net, ours):
        norm(x)
    assert_near(ours.running_mean, net.running_mean)


def test_momentum_of_one_keeps_the_last_statistics() -> None:
    """However large it was; a difference to it would round what is new away."""
    norm = keep_last_statistics(nn.BatchNorm1d(2).float())
    ours = convert_batch_norm(norm, Communicator.single_process(), 4, micro_batch=4)
    ours.running_var.fill_(1e12)
    ours.running_mean.fill_(1e12)
    x = torch.tensor([[0.0, 1.0], [1.0, 3.0]])
    ours(x)
    torch.testing.assert_close(ours.running_var, torch.tensor([0.5, 2.0]))
    torch.testing.assert_close(ours.running_mean, torch.tensor([0.5, 2.0]))


def test_eval_is_that_of_torch() -> None:
    net = copy.deepcopy(NET)
    ours = convert_batch_norm(copy.deepcopy(NET), Communicator.single_process(), 2, micro_batch=4)
    x = images(9)
    assert torch.equal(ours.eval()(x), net.eval()(x))


def test_group_without_samples_on_any_worker() -> None:
    def work(comm: Communicator) -> Tensor:
        norm = convert_batch_norm(nn.BatchNorm1d(2), comm, 4, micro_batch=2, global_batch=4)
        assert norm(torch.zeros(0, 2)).shape == (0, 2)
        return norm.running_var

    assert all(torch.equal(found, torch.ones(2)) for found in run_ranks(2, work))


def test_calls_without_samples_are_not_counted() -> None:
    """Without momentum the count is the weight: only calls that had samples have one."""

    def work(comm: Communicator) -> tuple[Tensor, Tensor]:
        norm = nn.BatchNorm1d(1, momentum=None)
        norm = convert_batch_norm(norm, comm, 4, micro_batch=2, global_batch=4)
        for x in (torch.zeros(0, 1), torch.zeros(2, 1), torch.zeros(0, 1), torch.full((2, 1), 3.0)):
            norm(x)
        return norm.running_mean, norm.num_batches_tracked

    for mean, count in run_ranks(2, work):
        assert mean == 1.5 and count == 2


@pytest.mark.parametrize("group_size", [1, 4])
def test_group_of_one_value_per_channel(group_size: int) -> None:
    """The same within a micro-batch as across workers, where torch's kernel refuses."""

    def work(comm: Communicator) -> list[Tensor]:
        norm = nn.BatchNorm1d(2)
        nn.init.constant_(norm.bias, 0.5)
        ghost = convert_batch_norm(copy.deepcopy(norm), comm, group_size, micro_batch=4)
        across = convert_batch_norm(norm, comm, 8, micro_batch=4, global_batch=8)
        x = torch.tensor([[2.0, -3.0]]) if comm.rank == 0 else torch.zeros(0, 2)
        found = []
        for module in (ghost, across):
            own = x.clone().requires_grad_()
            y = module(own)
            y.square().sum().backward()
            found += [y, own.grad, module.weight.grad, module.bias.grad, module.running_mean]
        return found

    found = run_ranks(2, work)[0]
    for ghost, across in zip(found[:5], found[5:], strict=True):
        torch.testing.assert_close(ghost, across)
    assert torch.equal(found[0], torch.full((1, 2), 0.5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ghost_groups_in_half_precision(dtype: torch.dtype) -> None:
    x = images(8)[:, :, 0, 0].to(dtype)
    plain = nn.BatchNorm1d(2).to(dtype)
    norm = convert_batch_norm(copy.deepcopy(plain), Communicator.single_process(), 4, micro_batch=8)
    y = norm(x)
    assert y.dtype == norm.running_mean.dtype == dtype
    expected = torch.cat([plain(group) for group in x.split(4)])
    torch.testing.assert_close(y, expected, rtol=0, atol=0.02)


def test_group_across_workers_in_half_precision() -> None:
    def work(comm: Communicator) -> tuple[Tensor, Tensor]:
        norm = convert_batch_norm(nn.BatchNorm1d(2), comm, 8, micro_batch=4, global_batch=8)
        x = (torch.arange(8.0).view(4, 2) * 8 + 1000).bfloat16().requires_grad_()
        y = norm(x)
        y.square().sum().backward()
        assert x.grad is not None
        assert y.dtype == x.grad.dtype == torch.bfloat16
        return y, norm.running_mean

    mean = (torch.arange(8.0).view(4, 2) * 8 + 1000).bfloat16().float().mean(0)
    for y, running_mean in run_ranks(2, work):
        assert y.isfinite().all()
        assert running_mean.dtype == torch.float32
        torch.testing.assert_close(running_mean, 0.1 * mean)  # to more digits than bfloat16's


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group_size": 0}, "`group_size` (=0) must be at least 1."),
        (
            {"group_size": 4, "micro_batch": 2.5},
            "`micro_batch` (=2.5) must be a whole number",
        ),
        ({"group_size": 5}, "`group_size` (=5) must divide `micro_batch` (=8); nearest: 4, 8."),
        (
            {"group_size": 12},
            "`group_size` (=12) must be a multiple of `micro_batch` (=8); nearest: 8, 16.",
        ),
        (
            {"group_size": 16},
            "`global_batch` (=None) must be 3 x 8 = 24. Or take `micro_batch` = 16.",
        ),
        ({"group_size": 16, "global_batch": 48}, "`global_batch` (=48) must be 3 x 8 = 24."),
        ({"group_size": 16, "global_batch": 24}, "3 workers don't divide in such groups"),
    ],
)
def test_group_sizes_that_do_not_fit(arguments: dict, message: str) -> None:
    def work(comm: Communicator) -> str:
        with pytest.raises(UsageError) as caught:
            convert_batch_norm(nn.BatchNorm1d(2), comm, **{"micro_batch": 8} | arguments)
        return str(caught.value)

    assert all(message in found for found in run_ranks(3, work))


class BatchNormReLU(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def hooked(register: str = "register_forward_hook") -> nn.Module:
    norm = nn.BatchNorm2d(2)
    getattr(norm, register)(lambda *_: None)
    return norm


def parametrized() -> nn.Module:
    norm = nn.BatchNorm2d(2)
    nn.utils.parametrize.register_parametrization(norm, "weight", nn.Softplus())
    return norm


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        (BatchNormReLU(2), "0 is a BatchNormReLU, whose own `forward` would be lost"),
        (hooked(), r"0 \(BatchNorm2d\) has hooks, which would be lost; convert first"),
        (hooked("register_full_backward_pre_hook"), r"0 \(BatchNorm2d\) has hooks, which would be"),
        (hooked("register_state_dict_pre_hook"), r"0 \(BatchNorm2d\) has hooks, which would be"),
        (hooked("register_load_state_dict_post_hook"), r"0 \(BatchNorm2d\) has hooks"),
        (parametrized(), r"0 \(ParametrizedBatchNorm2d\) has modules of its own"),
    ],
)
def test_convert_refuses_norms_with_hooks_or_own_forward(norm: nn.Module, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        convert_batch_norm(nn.Sequential(norm), Communicator.single_process(), 4, micro_batch=4)


def test_convert_every_kind_of_batch_norm_twice() -> None:
    model = nn.Sequential(nn.SyncBatchNorm(2), nn.BatchNorm3d(2))
    for group_size in (4, 2):
        convert_batch_norm(model, Communicator.single_process(), group_size, micro_batch=4)
        assert [norm.group_size for norm in model] == [group_size, group_size]


def test_deepcopy_shares_peers_and_pickle_is_refused() -> None:
    def work(comm: Communicator) -> Tensor:
        model = nn.Sequential(nn.BatchNorm1d(2))
        convert_batch_norm(model, comm, 4, micro_batch=2, global_batch=4)
        with pytest.raises(UsageError, match=r"can't be pickled .* call `leave_peers\(\)`"):
            pickle.dumps(model)
        twin = copy.deepcopy(model)
        model[0].leave_peers()
        assert isinstance(pickle.loads(pickle.dumps(model)), nn.Sequential)
        twin(torch.full((2, 2), float(comm.rank)))
        return twin[0].running_mean

    for mean in run_ranks(2, work):
        torch.testing.assert_close(mean, torch.full((2,), 0.05))  # a tenth of that over both


def test_wrong_input_shapes() -> None:
    comm = Communicator.single_process()
    norm = convert_batch_norm(nn.BatchNorm1d(2), comm, 2, micro_batch=2)
    with pytest.raises(UsageError, match="has 3 samples, but `micro_batch`"):
        norm(torch.randn(3, 2))
    with pytest.raises(UsageError, match=r"shape is \(2, 3\); expected \(samples, 2"):
        norm(torch.randn(2, 3))
    with pytest.raises(UsageError, match="LazyBatchNorm1d without a shape"):
        convert_batch_norm(nn.Sequential(nn.LazyBatchNorm1d()), comm, 2, micro_batch=2)


def test_keep_last_statistics_is_the_mean_of_the_last_step() -> None:
    batches = [images(16, seed=i) for i in range(3)]

    def train(comm: Communicator) -> Tensor:
        norm = keep_last_statistics(nn.BatchNorm2d(2, affine=False).double())
        exchange = attach(norm, comm)
        for batch in batches:
            with exchange.statistics.step():
                for part in batch.chunk(comm.size)[comm.rank].split(4):
                    with exchange.statistics.micro_batch(4 / 16):
                        norm(part)
        exchange.sync_buffers()
        return norm.running_mean

    for size in (1, 2, 4):
        for found in run_ranks(size, train):
            assert_near(found, batches[-1].mean((0, 2, 3)))


def test_precise_batch_norm_is_over_all_samples() -> None:
    x = images(22)
    parts = x.split(4)  # the last one is short
    norm = nn.BatchNorm2d(2, affine=False).double()
    means, variances = x.mean((0, 2, 3)), x.var((0, 2, 3))

    def work(comm: Communicator) -> tuple[nn.Module, nn.Module]:
        model = nn.Sequential(nn.Dropout(0.5), copy.deepcopy(norm))
        unused = nn.BatchNorm1d(3)
        model[0].add_module("unused", unused)
        local = parts[comm.rank :: comm.size]
        precise_batch_norm(model, [(part, None) for part in local] if comm.rank else local, comm)
        return model, unused

    for size in (1, 2, 7):  # the seventh worker has none
        for model, unused in run_ranks(size, work):
            assert_near(model[1].running_mean, means)
            assert_near(model[1].running_var, variances)
            assert model.training
            assert model[0].training
            assert model[1].momentum == 0.1
            assert model[1].num_batches_tracked == 0
            assert torch.equal(unused.running_var, torch.ones(3))
    # the controls: torch's moving average forgets the first batches, ...
    for part in parts:
        norm(part)
    assert float((norm.running_mean - means).abs().max()) > 0.1


def test_control_mean_of_variances_differs() -> None:
    """Maps that are constant in space: a batch of two shows half of the variance."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, 1, 1, generator=generator, dtype=torch.float64).expand(-1, -1, 5, 5)
    norm = nn.BatchNorm2d(3).double()
    precise_batch_norm(norm, list(x.split(2)), Communicator.single_process())
    assert_near(norm.running_var, x.var((0, 2, 3)))
    naive = torch.stack([part.var((0, 2, 3)) for part in x.split(2)]).mean(0)
    assert float((naive / norm.running_var).max()) < 0.7


@pytest.mark.parametrize("model_trains", [True, False])
def test_precise_batch_norm_leaves_frozen_norms(model_trains: bool) -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    model.train(model_trains)
    model[0].eval()
    precise_batch_norm(model, [torch.randn(8, 2) + 5.0], Communicator.single_process())
    assert model[0].running_mean.any() == (not model_trains)
    assert model[1].running_mean.any()
    assert model.training == model_trains and not model[0].training


def test_precise_batch_norm_interrupted_changes_nothing() -> None:
    def batches() -> Iterator[Tensor]:
        yield torch.full((4, 2), 7.0)
        raise KeyboardInterrupt

    norm = nn.BatchNorm1d(2)
    with pytest.raises(KeyboardInterrupt):
        precise_batch_norm(norm, batches(), Communicator.single_process())
    assert torch.equal(norm.running_mean, torch.zeros(2))
    assert torch.equal(norm.running_var, torch.ones(2))


def test_precise_batch_norm_without_batches() -> None:
    with pytest.raises(UsageError, match="`batches` is empty on every worker"):
        precise_batch_norm(nn.BatchNorm1d(2), [], Communicator.single_process())
    with pytest.raises(
        UsageError, match=r"`batches` \(a tensor of shape \(8, 2\)\) must be several"
    ):
        precise_batch_norm(nn.BatchNorm1d(2), torch.randn(8, 2), Communicator.single_process())
