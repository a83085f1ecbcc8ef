"""Gradients, parameters and statistics on a real GPU are those of one process, or of CPU ranks.

Programs of other files are run again where they fit. What is compared with another machine's
rounding is in float64: a difference beyond it is a mistake. See `tests.helpers.on_gpu`.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator
from allstep.errors import DisagreementError, UsageError
from allstep.exchange import ExchangePolicy, LocalSGD, Stale, Synchronous, attach
from allstep.exchange.ddp_comm_hook import ddp_hook
from allstep.exchange.fsdp_comm_hook import fsdp_hook
from allstep.exchange.wires import Float16, Int8, PowerSGD, TopK
from allstep.nn import convert_batch_norm
from tests.exchange import (
    test_batch_norm,
    test_contract,
    test_ddp_hook,
    test_fsdp_hook,
    test_fully_sharded,
    test_staleness,
)
from tests.exchange.conftest import POLICIES
from tests.exchange.nets import assert_same, clone, differs, mlp, shard, states
from tests.helpers.compare import state_difference
from tests.helpers.gpus import on_cpu
from tests.helpers.on_gpu import gpu, run_on_gpu
from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.process]

Found = dict[str, dict[str, Tensor]]  # by policy
Policies = Mapping[str, ExchangePolicy | None]

TOLERANCE = 1e-10
NUM_SAMPLES, GLOBAL_BATCH, MICRO_BATCH = 22, 10, 2  # 5, 5 and 1 micro-batches

WORKERS = pytest.mark.parametrize(
    ("size", "link"), [(2, "nccl"), (3, "nccl"), (2, "gloo")], ids=["nccl-2", "nccl-3", "gloo-2"]
)

FULL_PRECISION: Policies = {
    **{name: policy for name, policy in POLICIES.items() if name != "exact"},
    "ring": Synchronous(algorithm="ring"),
}
MEASURED: Policies = {  # which takes some hundred messages more
    "auto": Synchronous(algorithm="auto"),
    "auto-buckets": Synchronous(bucket_bytes="auto"),
}


def run(size: int, fn: Callable[..., Any], *args: Any, link: str = "nccl") -> list[Any]:
    """`run_on_gpu` in float64; tensors in the results are on the CPU."""
    return run_on_gpu(size, in_float64, fn, *args, link=link)


def in_float64(comm: Communicator, fn: Callable[..., Any], *args: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    return to_cpu(fn(comm, *args))


def to_cpu(data: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x.detach().cpu(), data)


def assert_near(found: Found, expected: Found, tolerance: float = TOLERANCE) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert state_difference(found[name], expected[name]) < tolerance, name


# -- gradients in full precision ---------------------------------------------------------------


def train_by_backward(
    comm: Communicator, start: nn.Module, batches: Tensor, policies: Policies
) -> Found:
    """Each worker its equal part of each batch; without a policy nothing is exchanged."""
    found: Found = {}
    for name, policy in policies.items():
        model = (copy.deepcopy(start) if policy is None else clone(start, comm)).to(comm.device)
        exchange = None if policy is None else attach(model, comm, policy)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for batch in batches:
            model(shard(batch, comm).to(comm.device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found[name] = states(model)
        if exchange is not None:
            exchange.detach()
    return found


@WORKERS
def test_plain_backward_trains_the_model_of_the_whole_batch(size: int, link: str) -> None:
    start, batches = mlp(), torch.randn(6, 12, 5)
    one = Communicator.single_process()
    [expected] = train_by_backward(one, start, batches, {"": None}).values()
    policies = {**FULL_PRECISION, **MEASURED}
    asked = {**policies, "alone": None}
    for found in run(size, train_by_backward, start, batches, asked, link=link):
        assert differs(found.pop("alone"), expected, by=1e-3)
        assert_near(found, dict.fromkeys(policies, expected))


def samples() -> tuple[Tensor, Tensor]:
    """[samples, 5], and the weights of their losses, of which some are 0."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 4, (NUM_SAMPLES,), generator=generator).double()


def loss_sum(model: nn.Module, x: Tensor, weights: Tensor) -> Tensor:
    return (weights * model(x)[:, 0].square()).sum()


def train_in_steps(
    comm: Communicator, start: nn.Module, policies: Policies, has_weights: bool = False
) -> Found:
    """Two epochs in `steps`: the parameters, and the losses of all workers together."""
    found: Found = {}
    for name, policy in policies.items():
        model = clone(start, comm).to(comm.device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        exchange = attach(model, comm, policy, optimizer=optimizer)
        loader = allstep.data.loader(
            TensorDataset(*samples()),
            comm,
            global_batch=GLOBAL_BATCH,
            micro_batch=MICRO_BATCH,
            shuffle=False,
        )
        losses = []
        for _ in range(2):
            for batch in allstep.steps(loader, exchange):
                for x, weights in batch:
                    if has_weights:
                        weight = float(weights.sum())
                        batch.backward(loss_sum(model, x, weights), weight=weight)
                    else:
                        batch.backward(model(x).square().mean())
                losses.append(batch.global_loss())
                optimizer.step()
                optimizer.zero_grad()
        for _ in exchange.flush():
            optimizer.step()
            optimizer.zero_grad()
        exchange.sync_buffers()
        found[name] = states(model) | {"losses": torch.tensor(losses)}
        exchange.detach()
    return found


def train_whole_batches(start: nn.Module, has_weights: bool) -> dict[str, Tensor]:
    """torch alone, on whole global batches."""
    model = copy.deepcopy(start)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for _ in range(2):
        for x, weights in zip(*(s.split(GLOBAL_BATCH) for s in samples()), strict=True):
            weights = weights if has_weights else torch.ones_like(weights)
            loss = loss_sum(model, x, weights) / weights.sum()
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
    return states(model) | {"losses": torch.tensor(losses)}


def train_means_and_sums(
    comm: Communicator, start: nn.Module, policies: Policies
) -> tuple[Found, Found]:
    means, sums = (train_in_steps(comm, start, policies, has) for has in (False, True))
    return means, sums


@WORKERS
def test_steps_train_the_model_of_whole_global_batches(size: int, link: str) -> None:
    """Uneven shares, weights, and a last batch of which a worker has no micro-batch."""
    start = mlp()
    of_means, of_sums = (train_whole_batches(start, has) for has in (False, True))
    assert differs(of_means, of_sums, by=1e-3)
    for means, sums in run(size, train_means_and_sums, start, FULL_PRECISION, link=link):
        assert_near(means, dict.fromkeys(FULL_PRECISION, of_means))
        assert_near(sums, dict.fromkeys(FULL_PRECISION, of_sums))


# -- formats, staleness, local SGD -------------------------------------------------------------

# Of float64 gradients that differ in their last digits alone, all formats round the same but once
# in some 10^9 numbers: CPU and GPU then come to the same, and so do sums of two in half precision,
# which every backend rounds once. Sums of three are rounded in the backend's own order.
HALVES: Policies = {
    "bf16": Synchronous(algorithm="native", compression="bf16"),
    "fp16": Synchronous(algorithm="native", compression="fp16", bucket_bytes=64),
}
OTHERS: Policies = {
    "int8": Synchronous(algorithm="native", compression="int8", bucket_bytes=64),
    "topk": Synchronous(algorithm="native", compression=TopK(fraction=0.3)),
    "powersgd": Synchronous(algorithm="native", compression=PowerSGD(rank=1)),
    "powersgd-small-buckets": Synchronous(
        algorithm="native", compression=PowerSGD(rank=1), bucket_bytes=64
    ),
    "stale": Stale(steps=2, algorithm="native", bucket_bytes=64),
    "stale-int8": Stale(steps=1, algorithm="native", compression=Int8(block=8)),
    "local": LocalSGD(sync_every=2, algorithm="native"),
    "local-later": LocalSGD(sync_every=4, local_after_step=1, algorithm="native"),
}


@WORKERS
def test_formats_and_late_updates_are_those_of_cpu_ranks(size: int, link: str) -> None:
    start = mlp()
    policies = {**HALVES, **OTHERS} if size == 2 else OTHERS
    expected = run_ranks(size, lambda comm: train_in_steps(comm, start, policies))[0]
    whole = train_whole_batches(start, has_weights=False)
    for state in expected.values():
        assert differs(state, whole, by=1e-6)
    for found in run(size, train_in_steps, start, policies, link=link):
        assert_near(found, expected, 1e-8)


def train_late(
    comm: Communicator, start: nn.Module, batches: Tensor, stalenesses: Sequence[int]
) -> dict[int, list[Tensor]]:
    found = {}
    for staleness in stalenesses:
        training = test_staleness.Late(start, comm, staleness, "momentum")
        for number, batch in enumerate(batches):
            training.step(number, batch)
        training.flush()
        training.exchange.detach()
        found[staleness] = list(training.model.parameters())
    return found


def test_stale_gradients_are_the_reference_s() -> None:
    start, batches = mlp(), torch.randn(test_staleness.NUM_STEPS, 12, 5)
    for found in run(3, train_late, start, batches, [1, 2, 4]):
        for staleness, parameters in found.items():
            expected = test_staleness.reference(start, batches, staleness, "momentum")
            fresh = test_staleness.reference(start, batches, 0, "momentum")
            assert test_staleness.largest_difference(parameters, expected) < TOLERANCE
            assert test_staleness.largest_difference(parameters, fresh) > 1e-3


# -- the same bits -----------------------------------------------------------------------------


def train_on_one_two_three(comm: Communicator) -> dict[str, list[bytes]]:
    """By compression: the bits of all gradients, of three workers, and of two beside one."""
    part = comm.split(int(comm.rank == 2))
    assert part is not None
    with part:
        return {
            compression: [
                bits_of(test_contract.train(workers, Synchronous(compression=compression), None))
                + bits_of([train_images(workers, compression)])
                for workers in (comm, part)
            ]
            for compression in ("exact", "fp32")
        }


def bits_of(tensors: Sequence[Tensor]) -> bytes:
    return b"".join(x.detach().cpu().numpy().tobytes() for x in tensors)


def train_images(comm: Communicator, compression: str) -> Tensor:
    """Convolutions and batch norm; the state."""
    generator = torch.Generator().manual_seed(2)
    model = nn.Sequential(*test_batch_norm.conv_net(), nn.Flatten(), nn.Linear(16, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 3)
    model.to(comm.device)
    x = torch.randn(44, 2, 6, 6, generator=generator)
    exchange = attach(model, comm, Synchronous(compression=compression))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    loader = allstep.data.loader(TensorDataset(x), comm, global_batch=20, micro_batch=4, seed=0)
    for _ in range(3):
        for batch in allstep.steps(loader, exchange):
            for (images,) in batch:
                batch.backward(model(images).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    exchange.sync_buffers()
    exchange.detach()
    return torch.cat([x.flatten().double() for x in model.state_dict().values()])


def test_exact_sums_have_the_same_bits_on_one_two_and_three_ranks() -> None:
    """In float32; the control, plain sums, depends on the number of ranks."""
    found = run_on_gpu(3, train_on_one_two_three)
    assert len({bits for worker in found for bits in worker["exact"]}) == 1
    assert len({bits for worker in found for bits in worker["fp32"]}) > 1


# -- parameters without gradients, accumulation, clipping, scaling -----------------------------

SEEDS = range(2)


def follow(comm: Communicator, names: Sequence[str]) -> list[list[list[list[float]]]]:
    """Random actions on `p.grad`: by seed and policy, what was seen."""
    policies = [Synchronous(plain=True), *map(test_contract.policy, names)]
    return [test_contract.follow(seed, comm, *policies) for seed in SEEDS]


@pytest.mark.parametrize("size", [2, 3])
def test_random_actions_on_gradients_equal_those_of_cpu_ranks(size: int) -> None:
    """Parameters that some ranks have no gradient for, `no_sync`, zeros, clipping."""
    names = list(test_contract.FORMATS)
    expected = run_ranks(size, lambda comm: follow(comm, []))
    for on_cpus, on_gpus in zip(expected, run(size, follow, names), strict=True):
        for (plain,), found in zip(on_cpus, on_gpus, strict=True):
            bounds = [1e-12, *(test_contract.FORMATS[name][1] for name in names)]
            for seen, bound in zip(found, bounds, strict=True):
                for one, other in zip(plain, seen, strict=True):
                    one, other = torch.tensor(one), torch.tensor(other)
                    atol = bound * max(1.0, float(one.nan_to_num().abs().max()))
                    torch.testing.assert_close(other, one, rtol=0, atol=atol, equal_nan=True)


SCALED: Mapping[str, tuple[ExchangePolicy, float]] = {
    "plain": (Synchronous(plain=True), TOLERANCE),
    "overlapped": (Synchronous(bucket_bytes=64), TOLERANCE),
    "fp16": (Synchronous(compression=Float16(on_overflow="inf")), 1e-2),
    "int8": (Synchronous(compression=Int8(block=1)), 1e-4),
}


def train_scaled(
    comm: Communicator, start: nn.Module, batches: Tensor, policies: Policies
) -> Found:
    """One of the workers has an overflow in step 1; step 2 is clipped."""
    found: Found = {}
    for name, policy in policies.items():
        model = clone(start, comm).to(comm.device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler(comm.device.type, init_scale=8.0)
        exchange = attach(model, comm, policy, scaler=scaler)
        for number, batch in enumerate(batches):
            loss = model(shard(batch, comm).to(comm.device)).square().mean()
            if number == 1 and comm.rank == comm.size - 1:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            if number == 2:
                scaler.unscale_(optimizer)
                exchange.clip_grad_norm_(0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found[name] = states(model) | {"scale": torch.tensor(scaler.get_scale())}
        exchange.detach()
    return found


def scaled_and_late(comm: Communicator, start: nn.Module, batches: Tensor) -> list[list[Tensor]]:
    """With a scaler that the exchange of late gradients knows, and without."""
    return [test_staleness.scaled_run(start, comm, batches, knows) for knows in (True, False)]


def test_overflow_on_one_worker_skips_the_step_on_all() -> None:
    start, batches = mlp(), torch.randn(4, 12, 5)
    model = copy.deepcopy(start)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in (0, 2, 3):
        model(batches[number]).square().mean().backward()
        if number == 2:
            assert float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)) > 0.2
        optimizer.step()
        optimizer.zero_grad()
    expected = states(model) | {"scale": torch.tensor(4.0)}
    policies = {name: policy for name, (policy, _) in SCALED.items()}
    for found in run(2, train_scaled, start, batches, policies):
        for name, (_, tolerance) in SCALED.items():
            assert_near({name: found[name]}, {name: expected}, tolerance)


def test_late_gradients_under_a_scaler_are_those_of_cpu_ranks() -> None:
    start, batches = mlp(), torch.randn(test_staleness.NUM_STEPS, 12, 5)
    expected, naive = run_ranks(2, lambda comm: scaled_and_late(comm, start, batches))[0]
    assert test_staleness.largest_difference(naive, expected) > 1e-3
    for found, _ in run(2, scaled_and_late, start, batches):
        assert test_staleness.largest_difference(found, expected) < TOLERANCE


# -- what goes wrong ---------------------------------------------------------------------------


def disagreements(comm: Communicator) -> dict[str, str]:
    """What each worker is told of another model, of gradients kept back, of edited parameters."""
    said = {}
    with pytest.raises(DisagreementError) as error:
        attach((mlp() if comm.rank != 1 else nn.Linear(5, 1)).to(comm.device), comm)
    said["another model"] = str(error.value)
    x = torch.ones(2, 5, device=comm.device)
    for planted in ("kept back", "edited"):
        model = mlp().to(comm.device)
        exchange = attach(model, comm)
        with pytest.raises(DisagreementError) as error:  # a step late on a GPU
            for step in range(5):
                if step == 1 and comm.rank == 1 and planted == "edited":
                    with torch.no_grad():
                        model[2].bias[0] += 1
                if step == 1 and comm.rank == 1 and planted == "kept back":
                    with exchange.no_sync():
                        model(x).sum().backward()
                else:
                    model(x).sum().backward()
        said[planted] = str(error.value)
        exchange.detach()
    return said


@pytest.mark.parametrize("link", ["nccl", "gloo"])
def test_disagreements_are_typed_and_name_the_ranks(link: str) -> None:
    words = {
        "another model": "rank 1",
        "kept back": "rank 1 wants: exchange gradients 1, after 1 `no_sync`",
        "edited": "values of 2.bias",
    }
    for said in run(2, disagreements, link=link):
        assert said.keys() == words.keys()
        for planted, message in said.items():
            assert words[planted] in message


def test_a_model_on_a_gpu_is_refused_by_a_communicator_of_cpus() -> None:
    elsewhere = torch.device("meta") if on_cpu() else gpu()
    with pytest.raises(UsageError, match=r"`0\.weight` on .* and `comm` computes on cpu: pass"):
        attach(mlp().to(elsewhere), Communicator.single_process())


def train_on_the_cpu(
    comm: Communicator, start: nn.Module, batches: Tensor, policies: Policies
) -> Found:
    """With a model that the user has left on the CPU."""
    found: Found = {}
    for name, policy in policies.items():
        model = clone(start, comm)
        exchange = attach(model, comm, policy)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for batch in batches:
            model(shard(batch, comm)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found[name] = states(model)
        exchange.detach()
    return found


def test_a_model_on_the_cpu_is_exchanged_by_a_communicator_of_gpus() -> None:
    start, batches = mlp(), torch.randn(6, 12, 5)
    one = Communicator.single_process()
    [expected] = train_by_backward(one, start, batches, {"": None}).values()
    policies = {name: FULL_PRECISION[name] for name in ("plain", "overlapped", "small-buckets")}
    for found in run(2, train_on_the_cpu, start, batches, policies):
        assert_near(found, dict.fromkeys(policies, expected))


# -- checkpoints -------------------------------------------------------------------------------

REMEMBERING: Policies = {
    "int8": Synchronous(compression="int8", bucket_bytes=128),
    "powersgd": Synchronous(compression=PowerSGD(rank=1)),
    "stale": Stale(steps=2),
    "stale-topk": Stale(steps=2, compression=TopK(fraction=0.3)),
}


def train_resumed(
    comm: Communicator, start: nn.Module, batches: Tensor, how: str, policies: Policies
) -> Found:
    """Two halves: attached once, or anew with what the first has saved, or without that."""
    found: Found = {}
    for name, policy in policies.items():
        model = clone(start, comm).to(comm.device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        exchange = attach(model, comm, policy)
        for number, batch in enumerate(batches):
            if number == len(batches) // 2 and how != "whole":
                saved = comm.broadcast_object(to_cpu(exchange.state_dict()))  # as from a file
                exchange.detach()
                exchange = attach(model, comm, policy)
                if how == "resumed":
                    exchange.load_state_dict(saved)
            model(shard(batch, comm).to(comm.device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for _ in exchange.flush():
            optimizer.step()
            optimizer.zero_grad()
        found[name] = states(model)
        exchange.detach()
    return found


def train_three_ways(
    comm: Communicator, start: nn.Module, batches: Tensor, policies: Policies
) -> list[Found]:
    ways = ("whole", "resumed", "begun anew")
    return [train_resumed(comm, start, batches, how, policies) for how in ways]


def test_residuals_and_late_gradients_go_through_a_checkpoint() -> None:
    start, batches = mlp(), torch.randn(6, 12, 5)
    for whole, resumed, begun_anew in run(2, train_three_ways, start, batches, REMEMBERING):
        assert_near(resumed, whole, 1e-12)
        for name in REMEMBERING:
            assert differs(begun_anew[name], whole[name], by=1e-6), name


# -- batch norm --------------------------------------------------------------------------------


def in_channels_last(model: nn.Module, x: Tensor, index: int) -> Tensor:
    return model(x.contiguous(memory_format=torch.channels_last))


def train_batch_norm(
    comm: Communicator, start: nn.Module, batches: Tensor, kinds: Sequence[tuple[str, str]]
) -> Found:
    """Parameters and statistics, by dtype and memory format."""
    found: Found = {}
    for dtype, memory in kinds:
        model = clone(start, comm).to(comm.device, getattr(torch, dtype))
        if memory == "nhwc":
            model.to(memory_format=torch.channels_last)
        x = batches.to(comm.device, getattr(torch, dtype))
        exchange = attach(model, comm)
        forward = in_channels_last if memory == "nhwc" else test_batch_norm.call
        test_batch_norm.train(exchange, model, x, forward)
        exchange.detach()
        found[f"{dtype} {memory}"] = states(model)
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_batch_norm_trains_the_model_of_one_process(size: int) -> None:
    """cuDNN rounds otherwise than the CPU does: by less than a thousand roundings of float32."""
    start, batches = test_batch_norm.conv_net(), test_batch_norm.images()
    one = Communicator.single_process()
    kinds = [(d, m) for d in ("float64", "float32") for m in ("nchw", "nhwc")]
    [expected] = train_batch_norm(one, start, batches, kinds[:1]).values()
    for found in run(size, train_batch_norm, start, batches, kinds):
        for name, state in found.items():
            tolerance = TOLERANCE if "float64" in name else 1e-4
            assert state_difference(state, expected) < tolerance, name


def call_across(
    comm: Communicator, start: nn.Module, x: Tensor, loss_weights: Tensor, is_converted: bool
) -> dict[str, Tensor]:
    """One call of a batch norm whose statistics are of all workers' samples."""
    net = copy.deepcopy(start).to(comm.device)
    if is_converted:
        convert_batch_norm(net, comm, len(x), micro_batch=len(x) // comm.size, global_batch=len(x))
    own = shard(x, comm).to(comm.device).requires_grad_()
    y = net(own)
    (y.sin() * shard(loss_weights, comm).to(comm.device)).sum().backward()
    gradients = {f"gradient of {n}": comm.all_reduce(p.grad) for n, p in net.named_parameters()}
    return {"y": y, "gradient of x": own.grad, **gradients, **dict(net.named_buffers())}


def test_batch_norm_across_workers_is_that_of_the_whole_batch() -> None:
    start, x = (
        test_batch_norm.conv_net(),
        torch.randn(12, 2, 6, 6) + torch.arange(12.0).view(-1, 1, 1, 1),
    )
    loss_weights = torch.randn(12, 4, 2, 2)
    one = Communicator.single_process()
    expected = to_cpu(call_across(one, start, x, loss_weights, False))
    found = run(3, call_across, start, x, loss_weights, True)
    assert_near({"": joined(found)}, {"": expected})
    alone = run(3, call_across, start, x, loss_weights, False)
    assert state_difference(joined(alone), expected) > 0.1


def joined(workers: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    parts = {n: torch.cat([found[n] for found in workers]) for n in ("y", "gradient of x")}
    return workers[-1] | parts


# -- DDP and FSDP2 -----------------------------------------------------------------------------


def train_with_ddp(
    comm: Communicator, starts: Mapping[str, nn.Module], batches: Tensor, policies: Policies
) -> Found:
    return {
        name: test_ddp_hook.train_worker(
            comm, starts[name], batches, test_ddp_hook.with_hook(policy)
        )
        for name, policy in policies.items()
    }


def test_ddp_with_the_hook_is_the_exchange_of_cpu_ranks() -> None:
    start, matrix = mlp(), nn.Linear(5, 60, bias=False)  # int8 depends on how parameters lie
    policies = {
        f"{wire} {staleness}": test_ddp_hook.policy(wire, staleness)
        for wire in ("fp32", "fp16", "bf16", "int8")
        for staleness in (0, 2)
    }
    starts = {name: matrix if "int8" in name else start for name in policies}
    batches = torch.randn(7, 2, 3, 5)
    expected = {
        name: test_ddp_hook.train(starts[name], batches, test_ddp_hook.with_exchange(policy))[0]
        for name, policy in policies.items()
    }
    assert differs(expected["fp16 0"], expected["fp32 0"], by=1e-6)
    for found in run(2, train_with_ddp, starts, batches, policies):
        assert_near(found, expected, 1e-8)


def resume_ddp(comm: Communicator, start: nn.Module, batches: Tensor) -> Found:
    """The last step after a checkpoint, which is written to the CPU, or not."""
    found: Found = {}
    for name in ("whole", "resumed", "begun anew"):
        model = copy.deepcopy(start).to(comm.device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        halves = [batches] if name == "whole" else [batches[:-1], batches[-1:]]
        saved: dict[str, Any] = {}
        for half in halves:
            hook = ddp_hook(Stale(steps=2, compression="int8"), comm)
            ddp = DistributedDataParallel(model, process_group=comm.process_group)
            ddp.register_comm_hook(model, hook)
            if saved and name == "resumed":
                hook.load_state_dict(saved)
            for batch in half:
                optimizer.zero_grad()
                ddp(shard(batch, comm).to(comm.device)).square().mean().backward()
                optimizer.step()
            saved = to_cpu(hook.state_dict())
        for _ in hook.flush():
            optimizer.step()
        found[name] = states(model)
    return found


def test_ddp_hook_goes_on_from_a_checkpoint_on_the_cpu() -> None:
    start, batches = mlp(), torch.randn(6, 12, 5)
    for found in run(2, resume_ddp, start, batches):
        assert_same(found["resumed"], found["whole"], rtol=1e-12)
        assert differs(found["begun anew"], found["whole"], by=1e-4)


def test_fsdp2_with_the_hook_is_the_exchange() -> None:
    test_fsdp_hook.check(run(4, test_fsdp_hook.work))


WIDTH, NUM_LAYERS = 64, 8


def reduce_in_bfloat16(
    comm: Communicator, start: nn.Sequential, batches: Tensor
) -> tuple[int, list[dict[str, Tensor]]]:
    """How many layers' gradients lie in memory of their own, and this worker's shards by step."""
    torch.set_default_dtype(torch.float32)
    mesh = init_device_mesh(comm.device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    replicas = allstep.init(process_group=mesh["replicate"], device=comm.device)
    model = copy.deepcopy(start).to(comm.device)
    in_bfloat16 = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    for module in (*model, model):
        fully_shard(module, mesh=mesh["shard"], mp_policy=in_bfloat16)
    fsdp_hook(model, replicas)
    found = []
    for batch in batches[:, comm.rank].to(comm.device):
        model.zero_grad()
        model(batch).square().mean().backward()
        local: dict[str, Tensor] = {n: p.grad.to_local() for n, p in model.named_parameters()}
        memory = {x.untyped_storage().data_ptr() for x in local.values()}
        found.append({name: x.clone() for name, x in local.items()})
    return len(memory), found


def layers() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_LAYERS))
    ).float()


def gradients_of(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(batch).square().mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_gradients_that_fsdp2_reduces_in_bfloat16_are_the_whole_batch_s() -> None:
    """Each layer's its own, though FSDP2 frees what the hook was given while it is in use.

    A worker's gradient is rounded, then the sum over shards, and over replicas: by 2^-9 each.
    """
    start, batches = layers(), torch.randn(5, 4, 8, WIDTH, dtype=torch.float32)
    workers = run(4, reduce_in_bfloat16, start, batches)
    assert [num_memories for num_memories, _ in workers] == [NUM_LAYERS] * 4
    for step, batch in enumerate(batches):
        expected = gradients_of(start, batch.flatten(0, 1))
        of_workers = [gradients_of(start, own) for own in batch]
        for replica in (workers[:2], workers[2:]):
            for name, gradient in expected.items():
                found = torch.cat([shards[step][name] for _, shards in replica])
                bound = 4 * 2**-9 * max(float(g[name].abs().max()) for g in of_workers)
                torch.testing.assert_close(found, gradient, rtol=0, atol=bound, msg=name)


@pytest.mark.parametrize("size", [2, 3])
def test_fully_sharded_model_is_that_of_one_worker(size: int) -> None:
    """The oracle computes on the GPU, too: dropout draws from its generator."""
    [(means, sums, _)] = run(1, test_fully_sharded.train_both, False)
    for of_means, of_sums, of_torch in run(size, test_fully_sharded.train_both, True):
        assert_same(of_means, means, rtol=1e-10)
        assert_same(of_sums, sums, rtol=1e-10)
        assert differs(of_torch, means, by=1e-6)
