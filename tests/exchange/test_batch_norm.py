"""Running statistics are the single process's, on any number of workers."""

import copy
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from allstep.comm import Communicator
from allstep.errors import UsageError
from allstep.exchange import Exchange, attach
from allstep.exchange.exchange import exchanges_of
from allstep.train.fitting import load_model_state
from tests.exchange.nets import assert_same, blocks, clone, differs, states
from tests.helpers.ranks import run_ranks

MICRO_BATCH = 8
NUM_SAMPLES = 12 * MICRO_BATCH - 5  # 12 micro-batches, the last one short
Forward = Callable[[nn.Module, Tensor, int], Tensor]


def conv_net(momentum: float | None = 0.1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3, momentum=momentum),
        nn.ReLU(),
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
    )


def images(num_steps: int = 4) -> Tensor:
    """Drifting, so that every micro-batch has other statistics."""
    drift = torch.linspace(0, 1, NUM_SAMPLES).view(1, -1, 1, 1, 1)
    return torch.randn(num_steps, NUM_SAMPLES, 2, 6, 6) * (1 + drift) + drift


def call(model: nn.Module, x: Tensor, index: int) -> Tensor:
    return model(x)


def train(
    exchange: Exchange, called: nn.Module, batches: Iterable[Tensor], forward: Forward = call
) -> dict[str, Tensor]:
    """Some steps as `allstep.steps` makes them; returns the buffers."""
    comm = exchange.comm
    optimizer = torch.optim.SGD(exchange.model.parameters(), 0.05, momentum=0.9)
    for batch in batches:
        with exchange.statistics.step(), exchange.no_sync():
            num_parts = len(batch.split(MICRO_BATCH))
            first = comm.rank * num_parts // comm.size
            parts = blocks(batch, MICRO_BATCH, comm.rank, comm.size)
            for index, part in enumerate(parts, first):
                share = comm.size * len(part) / len(batch)
                with exchange.statistics.micro_batch(share / comm.size):
                    (forward(called, part, index).square().mean() * share).backward()
        exchange.synchronize()
        optimizer.step()
        optimizer.zero_grad()
    exchange.sync_buffers()
    return dict(exchange.model.named_buffers())


def run(
    size: int,
    start: nn.Module,
    batches: Tensor,
    forward: Forward = call,
    compiled: bool = False,
) -> list[dict[str, Tensor]]:
    def worker(comm: Communicator) -> dict[str, Tensor]:
        model = clone(start, comm)
        called = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        return train(attach(model, comm), called, batches, forward)

    return run_ranks(size, worker)


def first_statistics(start: nn.Sequential, batch: Tensor, size: int = 1) -> tuple[Tensor, Tensor]:
    """Weighted mean of the first norm's micro-batch statistics, by hand."""
    mean, var = 0.0, 0.0
    for part in batch.split(MICRO_BATCH):
        hidden = start[0](part).detach()
        weight = len(part) / len(batch)
        mean = mean + weight * hidden.mean((0, 2, 3))
        var = var + weight * hidden.var((0, 2, 3), unbiased=True)
    return mean, var


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_equal_on_any_number_of_workers(size: int) -> None:
    start, batches = conv_net(), images()
    expected = run(1, start, batches)[0]
    assert expected["1.num_batches_tracked"] == len(batches)
    for actual in run(size, start, batches):
        assert_same(actual, expected)


@pytest.mark.parametrize("size", [1, 3])
def test_one_step_in_closed_form(size: int) -> None:
    start, batches = conv_net(), images(1)
    mean, var = first_statistics(start, batches[0])
    for actual in run(size, start, batches):
        torch.testing.assert_close(actual["1.running_mean"], 0.1 * mean, rtol=1e-12, atol=0)
        torch.testing.assert_close(actual["1.running_var"], 0.9 + 0.1 * var, rtol=1e-12, atol=0)


def test_naive_rules_differ() -> None:
    start, batches = conv_net(), images(1)
    expected = run(1, start, batches)[0]

    def sequential(comm: Communicator) -> dict[str, Tensor]:
        model = clone(start, comm)
        exchange = attach(model, comm)
        with exchange.no_sync():
            for part in blocks(batches[0], MICRO_BATCH, comm.rank, comm.size):
                model(part)
        exchange.sync_buffers()
        return dict(model.named_buffers())

    def unweighted(comm: Communicator) -> dict[str, Tensor]:
        model = clone(start, comm)
        exchange = attach(model, comm)
        with exchange.statistics.step():
            for part in blocks(batches[0], MICRO_BATCH, comm.rank, comm.size):
                with exchange.statistics.micro_batch(1 / 12):
                    model(part)
        exchange.sync_buffers()
        return dict(model.named_buffers())

    assert differs(run_ranks(2, sequential)[0], expected, by=0.05)
    assert differs(run_ranks(2, unweighted)[0], expected, by=1e-4)


@pytest.mark.parametrize("size", [1, 2])
def test_plain_loop_with_one_micro_batch_per_worker_needs_no_step(size: int) -> None:
    start, batch = conv_net(), images(1)[0, : 2 * MICRO_BATCH]

    def plain(comm: Communicator) -> dict[str, Tensor]:
        model = clone(start, comm)
        exchange = attach(model, comm)
        for part in blocks(batch, len(batch) // comm.size, comm.rank, comm.size):
            model(part).mean().backward()
        exchange.sync_buffers()
        return dict(model.named_buffers())

    def stepped(comm: Communicator) -> dict[str, Tensor]:
        model = clone(start, comm)
        exchange = attach(model, comm)
        with exchange.statistics.step():
            for part in blocks(batch, len(batch) // size, comm.rank, size):
                with exchange.statistics.micro_batch(1 / size):
                    model(part)
        exchange.sync_buffers()
        return dict(model.named_buffers())

    for plain_buffers, stepped_buffers in zip(
        run_ranks(size, plain), run_ranks(size, stepped), strict=True
    ):
        assert_same(plain_buffers, stepped_buffers)


def test_workers_without_a_micro_batch() -> None:
    start, batches = conv_net(), images(3)
    batches = batches[:, : 2 * MICRO_BATCH + 3]  # three micro-batches for five workers
    expected = run(1, start, batches)[0]
    for actual in run(5, start, batches):
        assert_same(actual, expected)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_cumulative_average(size: int) -> None:
    start, batches = conv_net(momentum=None), images()
    for actual in run(size, start, batches):
        assert_same(actual, run(1, start, batches)[0])
    mean, var = first_statistics(start, batches[0])
    first = run(size, start, batches[:1])[0]
    torch.testing.assert_close(first["1.running_mean"], mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(first["1.running_var"], var, rtol=1e-12, atol=0)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_state_that_is_loaded_between_steps_is_all_workers(momentum: float | None) -> None:
    start, batches = conv_net(momentum), images()[:, :MICRO_BATCH]  # one worker has none

    def worker(comm: Communicator) -> dict[str, Tensor]:
        model = clone(start, comm)
        exchange = attach(model, comm)
        first = copy.deepcopy(model.state_dict())

        def loading() -> Iterator[Tensor]:
            yield from batches[:2]
            model.load_state_dict(first)
            yield from batches[2:]

        return train(exchange, model, loading())

    expected = run_ranks(1, worker)[0]
    assert expected["1.num_batches_tracked"] == 2
    for actual in run_ranks(2, worker):
        assert_same(actual, expected)


def test_several_calls_in_a_micro_batch_count_with_their_mean() -> None:
    start, batches = conv_net(), images()

    def three_calls(model: nn.Module, x: Tensor, index: int) -> Tensor:
        return model(x) + model(2 * x) + model(x - 1)

    expected = run(1, start, batches, three_calls)[0]
    for actual in run(3, start, batches, three_calls):
        assert_same(actual, expected)
    parts = batches[0].split(MICRO_BATCH)
    mean = sum(
        len(part) / NUM_SAMPLES * start[0](x).detach().mean((0, 2, 3)) / 3
        for part in parts
        for x in (part, 2 * part, part - 1)
    )
    first = run(2, start, batches[:1], three_calls)[0]
    torch.testing.assert_close(first["1.running_mean"], 0.1 * mean, rtol=1e-12, atol=1e-15)


def test_more_micro_batches_than_are_kept_apart() -> None:
    start, batches = conv_net(), torch.randn(2, 45 * MICRO_BATCH - 3, 2, 6, 6)
    mean, var = first_statistics(start, batches[0])
    for size in (1, 2):  # 45, and 22 and 23 micro-batches
        first = run(size, start, batches[:1])[0]
        torch.testing.assert_close(first["1.running_mean"], 0.1 * mean, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(first["1.running_var"], 0.9 + 0.1 * var, rtol=1e-12, atol=0)
    assert_same(run(2, start, batches)[1], run(1, start, batches)[0], rtol=1e-11)


def test_a_module_that_some_micro_batches_skip() -> None:
    start, batches = conv_net(), images()

    def skipping(model: nn.Module, x: Tensor, index: int) -> Tensor:
        return model(x) if index % 5 == 0 else model[:4](x)

    expected = run(1, start, batches, skipping)[0]
    assert not torch.equal(expected["4.running_var"], torch.ones(4))
    for size in (2, 4, 6):
        for actual in run(size, start, batches, skipping):
            assert_same(actual, expected)


def test_a_module_that_nobody_calls_stays_as_it_is() -> None:
    start, batches = conv_net(), images()
    start[4].running_mean.fill_(1 / 3)
    for size in (1, 3):
        for actual in run(size, start, batches, lambda model, x, index: model[:4](x)):
            assert torch.equal(actual["4.running_mean"], torch.full((4,), 1 / 3))
            assert actual["4.num_batches_tracked"] == 0


def test_frozen_batch_norm_stays_as_it_is() -> None:
    start, batches = conv_net(), images()
    start[1].running_mean.fill_(1 / 3)
    start[1].eval()
    for size in (1, 3):
        for actual in run(size, start, batches):
            assert torch.equal(actual["1.running_mean"], torch.full((3,), 1 / 3))
            assert actual["1.num_batches_tracked"] == 0
            assert actual["4.num_batches_tracked"] == len(batches)


def test_evaluating_inside_a_micro_batch_sees_the_running_statistics() -> None:
    model, x = conv_net(), images(1)[0, :8]
    exchange = attach(model, Communicator.single_process())
    frozen = copy.deepcopy(model).eval()
    with exchange.statistics.step():
        with exchange.statistics.micro_batch(1.0):
            model(x).mean().backward()
            model.eval()
            assert torch.equal(model(x), frozen(x))
            model.train()
            assert_same(dict(model.named_buffers()), dict(frozen.named_buffers()), rtol=0)
        assert_same(dict(model.named_buffers()), dict(frozen.named_buffers()), rtol=0)
    assert differs(dict(model.named_buffers()), dict(frozen.named_buffers()), by=1e-3)
    assert model[1].momentum == 0.1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(use_reentrant: bool) -> None:
    start, batches = conv_net(), images()

    def checkpointed(model: nn.Module, x: Tensor, index: int) -> Tensor:
        x = x.clone().requires_grad_()
        return checkpoint(model, x, use_reentrant=use_reentrant)

    expected = run(1, start, batches)[0]
    for size in (1, 2):
        for actual in run(size, start, batches, checkpointed):
            assert_same(actual, expected)


def test_compiled_model() -> None:
    start, batches = conv_net(), images(3)
    batches = batches[:, :-3]  # micro-batches of equal size: one compilation
    expected = run(1, start, batches)[0]
    for size in (1, 2):
        for actual in run(size, start, batches, compiled=True):
            assert_same(actual, expected)


def test_instance_norm_with_running_statistics() -> None:
    start = nn.Sequential(nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3, track_running_stats=True))
    batches = images()
    expected = run(1, start, batches)[0]
    assert not torch.equal(expected["1.running_mean"], torch.zeros(3))
    for actual in run(3, start, batches):
        assert_same(actual, expected)


def test_lazy_batch_norm_counts_from_its_first_forward() -> None:
    batches = images(2)

    def worker(comm: Communicator) -> dict[str, Tensor]:
        linear = nn.Linear(72, 1)
        with torch.no_grad():
            linear.weight.fill_(0.1)
        model = nn.Sequential(nn.Flatten(), nn.LazyBatchNorm1d(affine=False), linear)
        return train(attach(model, comm), model, batches)

    expected = run_ranks(1, worker)[0]
    assert expected["1.num_batches_tracked"] == 2
    for actual in run_ranks(2, worker):
        assert_same(actual, expected)


def test_a_failed_forward_leaves_the_module_whole() -> None:
    model = conv_net()
    exchange = attach(model, Communicator.single_process())
    before = states(model)
    with (
        pytest.raises(ValueError, match="expected 4D input"),
        exchange.statistics.step(),
        exchange.statistics.micro_batch(1.0),
    ):
        model[1](torch.ones(2, 3))
    assert model[1].momentum == 0.1
    assert_same(states(model), before, rtol=0)
    with exchange.statistics.step(), exchange.statistics.micro_batch(1.0):
        model(images(1)[0, :8])
    assert model[1].num_batches_tracked == 1


def test_warns_once_about_evaluation_with_unsummed_statistics() -> None:
    start, x = conv_net(), images(1)[0, :8]

    def worker(comm: Communicator) -> None:
        model = clone(start, comm)
        exchange = attach(model, comm)
        model(x).mean().backward()
        model.eval()
        for _ in range(2):
            model(x)
        exchange.sync_buffers()

    with pytest.warns(UserWarning, match=r"call `exchange\.sync_buffers\(\)`") as caught:
        run_ranks(2, worker)
    assert len(caught) == 2  # once on each worker


def save(model: nn.Module) -> None:
    model.state_dict()


def save_part(model: nn.Module) -> None:
    model[1].state_dict()


def average(model: nn.Module) -> None:
    averaged = AveragedModel(conv_net())
    averaged.update_parameters(model)


def detach(model: nn.Module) -> None:
    for _, exchange in exchanges_of(model):
        exchange.detach()


def freeze_first_norm(model: nn.Module) -> None:
    model[1].eval()


def freeze_and_take_step(model: nn.Module) -> None:
    freeze_first_norm(model)
    model(torch.randn(4, 2, 6, 6)).mean().backward()


@pytest.mark.parametrize(
    "use",
    [save, save_part, copy.deepcopy, pickle.dumps, average, freeze_and_take_step, detach],
)
def test_warns_of_unsummed_statistics_that_are_copied_frozen_or_detached(
    use: Callable[[nn.Module], None],
) -> None:
    def worker(comm: Communicator) -> None:
        model = clone(conv_net(), comm)
        exchange = attach(model, comm)
        freeze_first_norm(model)  # as `attach` left it: nothing to warn of
        model(torch.randn(4, 2, 6, 6)).mean().backward()
        model.train()
        exchange.sync_buffers()
        for copies in (save, copy.deepcopy, average):
            copies(model)
        saved = copy.deepcopy(model.state_dict())
        model(torch.randn(4, 2, 6, 6)).mean().backward()
        load_model_state(model, saved)
        model(torch.randn(4, 2, 6, 6)).mean().backward()
        assert not caught
        comm.barrier()
        use(model)

    with pytest.warns(
        UserWarning, match=r"detached or copied .*; call `exchange\.sync_bu"
    ) as caught:
        run_ranks(2, worker)
    assert len(caught) == 2  # once on each worker


def test_does_not_warn_when_synced_alone_or_without_batch_norm() -> None:
    def worker(comm: Communicator, model: nn.Module, sync: bool) -> None:
        model = clone(model, comm)
        exchange = attach(model, comm)
        model(torch.randn(4, 2, 6, 6)).mean().backward()
        if sync:
            exchange.sync_buffers()
        model.eval()(torch.randn(4, 2, 6, 6))
        save(model)
        exchange.detach()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(2, lambda comm: worker(comm, conv_net(), True))
        run_ranks(1, lambda comm: worker(comm, conv_net(), False))
        run_ranks(2, lambda comm: worker(comm, nn.Conv2d(2, 2, 3), False))


def test_sync_is_idempotent_and_keeps_equal_buffers_exactly() -> None:
    start = conv_net()
    start[1].running_mean.copy_(torch.tensor([1 / 3, 0.1, 1e-9]))

    def worker(comm: Communicator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = clone(start, comm)
        exchange = attach(model, comm)
        exchange.sync_buffers()
        untouched = states(model)
        model(images(1)[0, :8])
        exchange.sync_buffers()
        first = states(model)
        exchange.sync_buffers()
        assert_same(states(model), first, rtol=0)
        return untouched, first

    for untouched, _ in run_ranks(3, worker):
        assert_same(untouched, states(start), rtol=0)


def statistics_beside_nan(comm: Communicator, batches: Tensor, momentum: float) -> Tensor:
    norm = nn.BatchNorm2d(2, momentum=momentum, affine=False)
    exchange = attach(norm, comm)
    exchange.statistics.leave_out_nonfinite()
    for batch in batches:
        with exchange.statistics.step():
            for part in blocks(batch, MICRO_BATCH, comm.rank, comm.size):
                with exchange.statistics.micro_batch(len(part) / len(batch)):
                    norm(part)
    exchange.sync_buffers()
    assert norm.running_mean is not None
    return norm.running_mean


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("momentum", [0.1, 1.0])
def test_statistics_of_nan_may_be_left_out(momentum: float, size: int) -> None:
    """Those of the micro-batch alone, whichever worker has it; no later step sees them either."""
    batches = images()
    batches[1, 3 * MICRO_BATCH] = torch.nan
    batches[2, -1] = torch.inf
    mean, weight = torch.zeros(2), 1.0
    for batch in batches:
        mean, weight = (1 - momentum) * mean, (1 - momentum) * weight
        for part in batch.split(MICRO_BATCH):
            if part.isfinite().all():
                share = momentum * len(part) / len(batch)
                mean, weight = mean + share * part.mean((0, 2, 3)), weight + share
    for found in run_ranks(size, lambda comm: statistics_beside_nan(comm, batches, momentum)):
        torch.testing.assert_close(found, mean / weight, rtol=1e-12, atol=0)


def test_a_step_of_nan_alone_changes_no_statistics() -> None:
    batches = images(2)[:, : 10 * MICRO_BATCH]
    expected = statistics_beside_nan(Communicator.single_process(), batches[:1], 1.0)
    batches[1] = torch.nan
    for found in run_ranks(2, lambda comm: statistics_beside_nan(comm, batches, 1.0)):
        torch.testing.assert_close(found, expected)


def test_a_momentum_that_changes_in_a_micro_batch_is_an_error() -> None:
    """As by a schedule in the inner loop; it had no effect but on the statistics taken there."""

    def schedule(model: nn.Module, x: Tensor, index: int) -> Tensor:
        model[1].momentum = 0.3
        return model(x)

    model = conv_net()
    with pytest.raises(UsageError, match="`momentum` of a BatchNorm2d was changed in the loop"):
        train(attach(model, Communicator.single_process()), model, images(1), schedule)
    assert [norm.momentum for norm in (model[1], model[4])] == [0.1, 0.1]


def test_micro_batch_belongs_inside_step() -> None:
    exchange = attach(conv_net(), Communicator.single_process())
    with (
        pytest.raises(UsageError, match=r"`micro_batch` belongs inside"),
        exchange.statistics.micro_batch(1.0),
    ):
        pass


class Counter(nn.Module):
    """Counts what it has seen, in three buffers of different kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("total", torch.zeros(2))
        self.register_buffer("is_used", torch.tensor(False), persistent=False)
        self.register_buffer("missing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        self.total += x.detach().sum(0)
        self.is_used.fill_(True)
        return x


def test_other_buffers_become_rank_0s() -> None:
    def worker(comm: Communicator) -> tuple[int, list[float], bool, list[float]]:
        model = nn.Sequential(Counter(), nn.BatchNorm1d(2, momentum=1.0), nn.Linear(2, 1))
        exchange = attach(model, comm)
        model(torch.full((2 + comm.rank, 2), float(comm.rank))).sum().backward()
        exchange.sync_buffers()
        counter, norm = model[0], model[1]
        return (
            int(counter.seen),
            counter.total.tolist(),
            bool(counter.is_used),
            norm.running_mean.tolist(),
        )

    assert run_ranks(3, worker) == [(2, [0.0, 0.0], True, [1.0, 1.0])] * 3
