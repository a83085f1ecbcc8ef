"""Layers that are divided over ranks on a GPU, against one process there and on the CPU."""

import copy
import json
import shutil
import signal
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import allstep
from allstep.comm import Communicator
from allstep.nn import (
    AvgPool2d,
    Chain,
    ChainPart,
    Conv2d,
    Grid,
    L2Pool2d,
    LocalContrastNorm,
    LocallyConnected2d,
    LocallyConnectedTranspose2d,
    MaxPool2d,
    MixtureOfExperts,
    SubtractiveNorm,
    convert_batch_norm,
    tensor_parallel,
)
from allstep.nn.local_products import Fields, correlations, responses, spread
from allstep.nn.windows import Layout, full_tensor, local_shard
from allstep.recipes.cots import Cots
from allstep.recipes.token_loss import summed_cross_entropy
from allstep.recipes.transformer_parallel import tensor_parallel_plan
from tests.helpers.divided import whole_state
from tests.helpers.gpus import on_cpu
from tests.helpers.on_gpu import gpu, over_links, run_on_gpu
from tests.helpers.processes import run_processes
from tests.nn.grids import values
from tests.nn.test_batch_norm import NET, images, loss_of, one_process
from tests.nn.test_pipeline import pipeline
from tests.nn.test_pipeline import samples as pipeline_samples
from tests.nn.test_tensor_parallel import transformer
from tests.recipes.test_cots import TINY, filters_of

pytestmark = [pytest.mark.gpu, pytest.mark.process]

needs_cuda = pytest.mark.skipif(on_cpu(), reason="CUDA's own: waits, compiled kernels")

State = dict[str, Tensor]


def alone() -> Communicator:
    return Communicator.single_process(gpu())


def assert_same(found: State, expected: State, atol: float = 1e-10) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].device.type == "cpu"
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=name)


@contextmanager
def without_tf32() -> Iterator[None]:
    """Ranks have it off, the process of the tests not."""
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, False
    try:
        yield
    finally:
        matmul.allow_tf32 = before


# -- distributed arrays --------------------------------------------------------------------------

SIDES = (17, 13)


def arrays(comm: Communicator, shape: tuple[int, int]) -> State | None:
    """Output and all gradients of a net of all layers on a grid, whole, on rank 0."""
    grid = Grid(comm, shape)
    f64, layout = torch.float64, grid.split(SIDES)
    conv = Conv2d(grid, layout, 2, 4, 3, padding=1, seed=1, dtype=f64)
    pool = MaxPool2d(grid, conv.out_layout, 2)
    local = LocallyConnected2d(grid, pool.out_layout, 4, 3, 1, (3, 1, 1), seed=2, dtype=f64)
    decoder = LocallyConnectedTranspose2d(local, tied=False)
    roots = L2Pool2d(grid, local.out_layout, 2, 1)
    norm = LocalContrastNorm(grid, roots.out_layout, 3, floor=None)
    mean = AvgPool2d(grid, norm.out_layout, 3, 1, 1, count_include_pad=False)
    x = local_shard(grid, values(3, 2, *SIDES), layout).to(comm.device).requires_grad_()
    hidden = local(pool(conv(x).tanh()))
    y, z = mean(norm(roots(hidden))), decoder(hidden)
    seeds = [
        local_shard(grid, values(*t.shape[:2], *to.shape, seed=5), to).to(comm.device)
        for t, to in ((y, mean.out_layout), (z, decoder.out_layout))
    ]
    ((y**2 * seeds[0]).sum() + (z**2 * seeds[1]).sum()).backward()
    parts: dict[str, tuple[Tensor | None, Layout, int]] = {
        "y": (y, mean.out_layout, -2),
        "z": (z, decoder.out_layout, -2),
        "x.grad": (x.grad, layout, -2),
        "local.weight": (local.weight.grad, local.block_layout, 0),
        "local.bias": (local.bias.grad, local.out_layout, 0),
        "decoder.weight": (decoder.weight.grad, decoder.in_layout, 0),
    }
    found = {"conv.weight": conv.weight.grad, "conv.bias": conv.bias.grad}
    for name, (part, of, first_dim) in parts.items():
        found[name] = full_tensor(grid, part, of, first_dim=first_dim)
    assert comm.size == 1 or grid.stats.messages_sent > 0
    return {name: g.detach().cpu() for name, g in found.items()} if comm.rank == 0 else None


@over_links
def test_distributed_arrays(link: str) -> None:
    expected = arrays(Communicator.single_process(), (1, 1))
    assert_same(arrays(alone(), (1, 1)), expected)
    whole, *_ = run_on_gpu(4, arrays, (2, 2), link=link)
    assert_same(whole, expected)


def difference_without_halo(comm: Communicator) -> float:
    """How far a layer is from one that sees zeros in place of the neighbour's part."""
    grid = Grid(comm, (2, 1))
    layer = Conv2d(grid, grid.split((8, 8)), 1, 1, 3, padding=1, seed=1, dtype=torch.float64)
    x = local_shard(grid, values(1, 1, 8, 8), layer.in_layout).to(comm.device)
    own = nn.functional.conv2d(x, layer.weight, layer.bias, padding=1)
    return float((layer(x) - own).detach().abs().max())


def test_control_of_distributed_arrays() -> None:
    assert min(run_on_gpu(2, difference_without_halo)) > 0.01


@needs_cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_host_waits_for_nothing_in_the_layers() -> None:
    """Forward and backward, once their buffers are there."""
    grid = Grid(alone())
    layout = grid.split((12, 12))
    local = LocallyConnected2d(grid, layout, 2, 3, 1, (2, 1, 1), seed=0)
    layers = [
        Conv2d(grid, layout, 2, 2, 3, padding=1, seed=0),
        AvgPool2d(grid, layout, 3, 1, 1, count_include_pad=False),
        MaxPool2d(grid, layout, 2),
        L2Pool2d(grid, layout, 2),
        SubtractiveNorm(grid, layout, 3),
        LocalContrastNorm(grid, layout, 3),
        LocalContrastNorm(grid, layout, 3, floor=None),
        nn.Sequential(local, LocallyConnectedTranspose2d(local, tied=True)),
    ]
    x = torch.randn(4, 2, 12, 12, device=gpu(), requires_grad=True)
    for layer in layers:
        layer(x).sum().backward()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer(x).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


# -- local products ------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "unit"), [(torch.float32, 2**-24), (torch.bfloat16, 2**-8)])
def test_local_products_are_those_of_float64(dtype: torch.dtype, unit: float) -> None:
    """Against the largest sum of magnitudes, of which rounding changes a sum by a part.

    In float32 by up to a unit for each of its up to 45 products, in bfloat16, whose products of
    matrices add up in float32, by one for each of the nine receptive fields that `spread` adds up.
    """
    fields = Fields((3, 3), (1, 1))
    x = values(*fields.input_shape((4, 7)), 5, 8).to(dtype)
    weight, y = values(4, 7, 6, 45, seed=1).to(dtype), values(4, 7, 6, 8, seed=2).to(dtype)
    num_roundings = 48 if dtype == torch.float32 else 10
    for function, given in (
        (responses, (x, weight)),
        (spread, (y, weight)),
        (correlations, (y, x)),
    ):
        exact = function(*(t.double() for t in given), fields)
        scale = function(*(t.double().abs() for t in given), fields)
        with without_tf32():
            found = function(*(t.to(gpu()) for t in given), fields).cpu()
        assert found.dtype == dtype
        allowed = num_roundings * unit * scale.max()
        assert (found - exact).abs().max() <= allowed
        elsewhere = exact.roll(1, 0)  # the control: what belongs to the row before
        assert (elsewhere - exact).abs().max() > allowed


# -- batch norm over groups ----------------------------------------------------------------------


def batch_norms(comm: Communicator, shares: Sequence[int]) -> tuple[Tensor, Tensor, State]:
    size = comm.size
    net = copy.deepcopy(NET).to(comm.device)
    convert_batch_norm(net, comm, 4 * size, micro_batch=4, global_batch=4 * size)
    part = images(sum(shares)).split(list(shares))[comm.rank].to(comm.device).requires_grad_()
    y = net(part)
    loss_of(y.cpu()).backward()
    assert part.grad is not None
    found = {name: x.cpu() for name, x in net.named_buffers()}
    for name, p in net.named_parameters():
        assert p.grad is not None
        found[name] = comm.all_reduce(p.grad).cpu()
    return y.detach().cpu(), part.grad.cpu(), found


def test_batch_norm_over_groups_of_ranks() -> None:
    """Of unequal shares, one of them without samples."""
    shares = (4, 0, 3)
    x = images(sum(shares))
    y, grad, expected = one_process(x, [len(x)])
    parts, grads, states = zip(*run_on_gpu(3, batch_norms, shares), strict=True)
    scale = float(grad.abs().max())
    assert_same({"y": torch.cat(parts)}, {"y": y}, 1e-10)
    assert_same({"grad": torch.cat(grads)}, {"grad": grad}, 1e-10 * max(1.0, scale))
    for state in states:
        for name, value in expected.items():
            atol = 1e-10 * max(1.0, float(value.abs().max()))
            assert_same({name: state[name].to(value)}, {name: value}, atol)


# -- tensor parallelism --------------------------------------------------------------------------


def guess_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean loss of logits, which may be sharded, that guess the token they see."""
    return summed_cross_entropy(logits.flatten(0, 1), tokens.flatten()) / tokens.numel()


def attended(
    comm: Communicator,
    num_data: int,
    dropout: float,
    run_dir: Path | None = None,
    stops_after: int | None = None,
) -> State:
    """Three steps of a transformer on data x tensor, by LAMB, which needs norms of whole layers."""
    mesh = comm.mesh(data=num_data, tensor=comm.size // num_data)
    model = transformer().to(comm.device)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    tensor_parallel(model, mesh, tensor_parallel_plan(model))
    optimizer = allstep.optim.LAMB(model.parameters(), lr=0.01)
    exchange = allstep.attach(model, mesh["data"], optimizer=optimizer)
    tokens = torch.randint(50, (22, 12), generator=torch.Generator().manual_seed(1))
    with ExitStack() as stack:
        loader = stack.enter_context(
            allstep.data.loader(TensorDataset(tokens), mesh["data"], global_batch=8, micro_batch=4)
        )
        checkpoint, epochs = None, iter(range(1))
        if run_dir is not None:
            state = {"optimizer": optimizer}
            checkpoint = stack.enter_context(
                allstep.AutoCheckpoint(run_dir, loader, exchange, state=state, every_steps=1)
            )
            epochs = checkpoint.epochs(1)
        for _ in epochs:
            for batch in allstep.steps(loader, exchange, checkpoint=checkpoint):
                for (x,) in batch:
                    batch.backward(guess_of(model(x), x))
                optimizer.step()
                optimizer.zero_grad()
                if batch.step == stops_after:
                    signal.raise_signal(signal.SIGTERM)
    return whole_state(model)


def test_tensor_parallel_on_data_and_tensor() -> None:
    """With the masks of one process on the GPU; without, the numbers of a CPU."""
    expected = attended(alone(), 1, 0.2)
    without = attended(Communicator.single_process(), 1, 0.0)
    assert_same(attended(alone(), 1, 0.0), without)
    assert max(float((expected[n] - x).abs().max()) for n, x in without.items()) > 1e-4
    for found in run_on_gpu(4, attended, 2, 0.2):
        assert_same(found, expected)


def test_checkpoints_go_to_a_cpu_and_back(tmp_path: Path) -> None:
    """A step on two ranks of the GPU, one on a CPU, and the last on the GPU, in other shards."""
    expected = attended(Communicator.single_process(), 1, 0.0)
    run_on_gpu(2, attended, 1, 0.0, tmp_path, 0)
    run_processes(1, attended, 1, 0.0, tmp_path, 1, timeout_s=90)
    shutil.copytree(tmp_path, tmp_path / "copy", ignore=lambda *_: ["copy"])
    assert_same(attended(Communicator.single_process(), 1, 0.0, tmp_path / "copy"), expected)
    for found in run_on_gpu(2, attended, 2, 0.0, tmp_path):
        assert_same(found, expected)


def in_bfloat16(comm: Communicator, enabled: bool = True) -> State:
    """Gradients of a divided transformer of float32 under autocast."""
    mesh = comm.mesh(data=1, tensor=comm.size)
    model = transformer().float().eval().to(comm.device)
    tensor_parallel(model, mesh, tensor_parallel_plan(model))
    tokens = torch.randint(50, (3, 12), generator=torch.Generator().manual_seed(1))
    with torch.autocast(comm.device.type, torch.bfloat16, enabled=enabled):
        y = model(tokens.to(comm.device))
    guess_of(y.float(), tokens.to(comm.device)).backward()
    for p in model.parameters():
        p.data.copy_(p.grad)
    return whole_state(model)


def distances(found: State, expected: State) -> list[float]:
    """Of each tensor, relative to its norm."""
    return [float((found[name] - x).norm() / x.norm()) for name, x in expected.items()]


def test_autocast_of_a_divided_transformer() -> None:
    """It rounds the parts of a sum, which is about as far from the sum as rounding it is."""
    expected = in_bfloat16(alone())
    with without_tf32():
        float32 = in_bfloat16(alone(), False)
    rounding = max(distances(expected, float32))
    assert rounding > 2**-9  # the control: something is rounded to 8 bits
    for found in run_on_gpu(2, in_bfloat16):
        assert max(distances(found, float32)) < 3 * rounding


# -- experts -------------------------------------------------------------------------------------

D, E = 4, 12


class Routed(nn.Module):
    """Experts with dropout that take few tokens, a dense layer, and experts that take all."""

    def __init__(self, comm: Communicator, dropout: float) -> None:
        super().__init__()

        def expert() -> nn.Module:
            return nn.Sequential(
                nn.Linear(D, 5), nn.GELU(), nn.Linear(5, D), nn.Dropout(dropout)
            ).double()

        self.first = MixtureOfExperts(expert, comm, D, E, top_k=2, capacity_factor=1.5, seed=1)
        self.dense = nn.Linear(D, D)
        self.second = MixtureOfExperts(expert, comm, D, E, seed=2)
        self.num_dropped = 0
        with torch.no_grad():
            for i, p in enumerate(self.dense.parameters()):
                p.copy_(values(*p.shape, seed=50 + i))
        self.double().to(comm.device)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, first = self.first(x)
        self.num_dropped += self.first.num_dropped
        y, second = self.second(self.dense(x + y))
        return y, first + second


def routed(comm: Communicator, dropout: float) -> State:
    """Three steps, of 5, 5 and 3 micro-batches; parameters, and how often there was no room."""
    model = Routed(comm, dropout)
    exchange = allstep.attach(model, comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    samples = TensorDataset(values(51, 3, D, seed=1), values(51, 3, D, seed=2))
    with allstep.data.loader(samples, comm, global_batch=20, micro_batch=4, seed=11) as loader:
        for batch in allstep.steps(loader, exchange):
            for x, target in batch:
                y, balance = model(x)
                batch.backward((y - target).square().mean() + 0.1 * balance)
            exchange.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
    exchange.detach()
    dropped = comm.all_reduce(torch.tensor(model.num_dropped))
    found = {name: p.detach().cpu() for name, p in model.named_parameters()}
    return found | {"dropped": dropped.cpu()}


def merged(found: Sequence[State]) -> State:
    """What each worker has, in the order of one worker's."""
    return {name: value for own in found for name, value in own.items()}


def test_experts_on_ranks_with_unequal_numbers_of_micro_batches() -> None:
    expected = routed(alone(), 0.3)
    assert expected["dropped"] > 0
    without = routed(Communicator.single_process(), 0.0)
    assert_same(routed(alone(), 0.0), without)
    assert max(float((expected[n] - x).abs().max()) for n, x in without.items()) > 1e-3
    found = merged(run_on_gpu(4, routed, 0.3))
    assert_same({name: found[name] for name in expected}, expected)


def routed_in_bfloat16(comm: Communicator) -> State:
    """Outputs for tokens of rank 0, which alone has autocast; the other ranks serve it."""
    layer = MixtureOfExperts(lambda: nn.Linear(D, D), comm, D, E, top_k=2, seed=1).to(comm.device)
    if comm.rank > 0:
        layer.serve().backward()
        return {}
    x = values(20, D, seed=3).float().to(comm.device)
    with torch.autocast(comm.device.type, torch.bfloat16):
        y, balance = layer(x)
    assert y.dtype == torch.float32
    (y.square().sum() + balance).backward()
    return {"y": y.detach().cpu(), "router": layer.router.weight.grad.cpu()}


def test_autocast_of_experts_on_other_ranks() -> None:
    expected = routed_in_bfloat16(alone())
    found, _ = run_on_gpu(2, routed_in_bfloat16)
    assert max(distances(found, expected)) < 2**-7


# -- stages --------------------------------------------------------------------------------------


def staged(comm: Communicator, num_data: int) -> dict[str, tuple[State, list[float]]]:
    """Three steps by each schedule, the last with a short micro-batch; parameters and losses."""
    found = {}
    for schedule in ("gpipe", "1f1b", "interleaved"):
        model, data = pipeline(comm, num_data, schedule=schedule)
        model.to(comm.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exchange = allstep.attach(model, data)
        losses = []
        loader = allstep.data.loader(pipeline_samples(46), data, global_batch=20, micro_batch=4)
        with loader:
            for batch in allstep.steps(loader, exchange):
                batch.run(model)
                losses.append(batch.global_loss())
                optimizer.step()
                optimizer.zero_grad()
        exchange.detach()
        state = {name: p.detach().cpu() for name, p in model.named_parameters()}
        found[schedule] = (state, losses)
    return found


@pytest.mark.parametrize(("size", "num_data"), [(2, 1), (4, 2)])
def test_stages_of_a_pipeline(size: int, num_data: int) -> None:
    """With the masks of one process on the GPU."""
    expected = staged(alone(), 1)
    for found in run_on_gpu(size, staged, num_data):
        for schedule, (state, losses) in found.items():
            whole, same_losses = expected[schedule]
            assert len(state) == 8 * num_data // size  # two parameters a stage
            assert_same(state, {name: whole[name] for name in state})
            assert losses == pytest.approx(same_losses, rel=0, abs=1e-10)


def chained(comm: Communicator) -> State:
    """Gradients of a chain of an LSTM and a head, on two ranks if there are."""
    torch.manual_seed(0)
    modules = [nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)]
    first, last = (module.double().to(comm.device) for module in modules)
    last_rank = comm.size - 1
    parts = [
        ChainPart("encoder", first, 0, ("x",), ("hidden", "state")),
        ChainPart("decoder", last, last_rank, ("hidden",), ("y",)),
    ]
    mesh = comm.mesh(data=1, model=comm.size)
    chain = Chain(parts, mesh, inputs=("x",), outputs=("y", "state"))
    found, delegate = chain(x=values(2, 5, 3).to(comm.device))
    loss = found["y"].square().sum() if "y" in found else 0
    (loss + delegate).backward()
    return {name: p.grad.cpu() for name, p in chain.named_parameters()}


def test_chain_of_modules() -> None:
    expected = chained(Communicator.single_process())
    assert_same(chained(alone()), expected)
    assert_same(merged(run_on_gpu(2, chained)), expected)


# -- the recipe ----------------------------------------------------------------------------------

FEW = TINY | {"steps": 1}


def greedily(comm: Communicator, run_dir: Path) -> None:
    assert Cots(**FEW).run(comm, run_dir, resume=False) == 0


def test_cots(tmp_path: Path) -> None:
    """Its checkpoints are of divided filters, and are read on the CPU."""
    folders = [tmp_path / name for name in ("cpu", "gpu")]
    for folder in folders:
        folder.mkdir()
    greedily(Communicator.single_process(), folders[0])
    run_on_gpu(2, greedily, folders[1])
    expected, found = map(filters_of, folders)
    assert len(found) == 3
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)
    reports = [json.loads((folder / "report.json").read_text()) for folder in folders]
    assert reports[1]["costs"] == pytest.approx(reports[0]["costs"], rel=1e-10)
    faces, same_faces = ([row["auc"] for row in report["neurons"]] for report in reports)
    assert faces == pytest.approx(same_faces, abs=0.02)  # of 50 faces one may change its place


# -- compiled ------------------------------------------------------------------------------------


def has_compiler() -> bool:
    """What torch's inductor and Triton need to make kernels."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return any(map(shutil.which, ("cc", "gcc", "clang"))) and headers.exists()


class Between(nn.Module):
    """Experts between what can be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MixtureOfExperts(lambda: nn.Linear(D, D), alone(), D, E, top_k=2, seed=5)
        self.double().to(gpu())

    def forward(self, x: Tensor) -> Tensor:
        y, balance = self.moe((x + 1).sin())
        return y.tanh().sum() + balance


@pytest.mark.filterwarnings("ignore")  # torch's, of what it could do faster
def test_compiled_around_experts() -> None:
    if not on_cpu() and not has_compiler():
        pytest.skip("needs a C compiler and Python's headers")
    model, found = Between(), []
    x = values(9, D).to(gpu())
    for call in (model, torch.compile(model, backend="aot_eager" if on_cpu() else "inductor")):
        model.zero_grad()
        loss = call(x)
        loss.backward()
        state: dict[str, Any] = {n: torch.zeros_like(p).cpu() for n, p in model.named_parameters()}
        state |= {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
        found.append(state | {"loss": loss.detach().cpu()})
    assert_same(found[1], found[0], 1e-12)
