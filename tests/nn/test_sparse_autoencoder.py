"""Sparse autoencoders: the cost and its gradients, the same filters on any grid, frozen stages."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import allstep
from allstep.comm import Communicator
from allstep.errors import UsageError
from allstep.nn import (
    AutoencoderStage,
    DividedTensor,
    Grid,
    Layout,
    SparseAutoencoder,
    StageTraining,
)
from allstep.nn.windows import full_tensor, local_shard
from tests.helpers.compare import differing_names
from tests.helpers.ranks import run_ranks
from tests.nn.grids import on_grid, values

SIDE = 19
STAGES = (  # kernel, stride, block, pool, its stride
    (5, 2, (4, 2, 2), 3, 2),
    (3, 1, (6, 1, 1), 2, 1),
    (2, 1, (8, 1, 1), 2, 1),
)


def nine_layers(grid: Grid, *, relu: bool = False) -> nn.Sequential:
    layout, channels, stages = grid.split((SIDE, SIDE)), 2, []
    for seed, (kernel, stride, block, pool, pool_stride) in enumerate(STAGES):
        stage = AutoencoderStage(
            grid,
            layout,
            channels,
            kernel,
            stride,
            block,
            pool_size=pool,
            pool_stride=pool_stride,
            norm_size=3,
            relu=relu,
            seed=seed,
            dtype=torch.float64,
        )
        stages.append(stage)
        layout, channels = stage.out_layout, block[0]
    return nn.Sequential(*stages)


def batch(grid: Grid, step: int) -> Tensor:
    layout = grid.split((SIDE, SIDE))
    return local_shard(grid, values(6, 2, SIDE, SIDE, seed=step), layout)


def lone() -> Grid:
    return Grid(Communicator.single_process())


def reference(
    stage: AutoencoderStage, decoder: Tensor, scale: Tensor, x: Tensor, sparsity: float
) -> Tensor:
    """The cost with a dense matrix for encoder and decoder, without any of the layers."""
    filtering = stage.filtering
    rows, columns, num_filters, _ = filtering.weight.shape
    kernel, step, height, width = 5, 2, 2, 2
    encode, decode = [], []
    for i in range(rows):
        for j in range(columns):
            for f in range(num_filters):
                for weight, matrix in ((filtering.weight, encode), (decoder, decode)):
                    field = weight[i, j, f].view(kernel, kernel, 2).permute(2, 0, 1)
                    row = x.new_zeros(2, SIDE, SIDE)
                    area = (slice(None), slice(i * step, i * step + kernel))
                    row = row.index_put(
                        torch.meshgrid(
                            torch.arange(2),
                            torch.arange(SIDE)[area[1]],
                            torch.arange(j * step, j * step + kernel),
                            indexing="ij",
                        ),
                        field,
                    )
                    matrix.append(row.flatten())
    flat = x.flatten(1)
    y = flat @ torch.stack(encode).T
    decoded = scale * y @ torch.stack(decode)
    maps = y.view(len(x), rows, columns, height, width, -1).permute(0, 5, 1, 3, 2, 4)
    maps = maps.reshape(len(x), -1, rows * height, columns * width)
    windows = maps.unfold(2, 3, 2).unfold(3, 3, 2)
    pools = (windows.square().sum((4, 5)) + 1e-8).sqrt()
    return ((decoded - flat).square().sum() + sparsity * pools.sum()) / len(x)


@pytest.mark.parametrize("tied", [True, False])
def test_cost_and_gradients_against_dense_matrices(tied):
    (stage, *_) = nine_layers(lone())
    autoencoder = SparseAutoencoder(stage, sparsity=0.3, tied=tied)
    decoder, scale = autoencoder.decoder.weight, autoencoder.scale
    with torch.no_grad():
        scale.fill_(0.7)
        if not tied:
            decoder.add_(0.1)
    x = batch(lone(), 0)
    parameters = list(autoencoder.parameters())
    assert len(parameters) == (2 if tied else 3)

    expected = reference(stage, decoder, scale, x, 0.3)
    found = autoencoder(x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    pairs = zip(
        torch.autograd.grad(found, parameters),
        torch.autograd.grad(expected, parameters),
        strict=True,
    )
    for gradient, expected_gradient in pairs:
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-12)
    assert not torch.isclose(autoencoder(x), reference(stage, decoder, scale, x, 0.0))


@pytest.mark.parametrize("relu", [False, True])
def test_gradients_against_finite_differences(relu):
    stage = AutoencoderStage(
        lone(), lone().split((5, 5)), 1, 3, 2, (2, 1, 1),
        pool_size=2, pool_stride=2, norm_size=3, relu=relu, seed=1, dtype=torch.float64,
    )  # fmt: skip
    autoencoder = SparseAutoencoder(stage)
    x = values(3, 1, 5, 5)

    def cost(weight: Tensor, scale: Tensor) -> Tensor:
        named = {"stage.filtering.weight": weight, "decoder.weight": weight, "scale": scale}
        return torch.func.functional_call(autoencoder, named, (x,))

    given = stage.filtering.weight.detach().requires_grad_(), autoencoder.scale
    assert torch.autograd.gradcheck(cost, given)


def whole(state: dict[str, Tensor | DividedTensor]) -> dict[str, Tensor] | None:
    """With tensors for divided ones, on rank 0; None elsewhere. All workers call it."""
    found = {
        name: full_tensor(Grid(x.comm), x.local, Layout(x.shape[:2], x.windows), first_dim=0)
        for name, x in state.items()
        if isinstance(x, DividedTensor)
    }
    return None if any(x is None for x in found.values()) else {**state, **found}


def trained(grid: Grid, *, num_steps: int, **options: bool) -> list[dict[str, Tensor] | None]:
    """The state of each stage after its training, on rank 0."""
    relu = options.pop("relu", False)
    stages, states = nine_layers(grid, relu=relu), []
    for i, stage in enumerate(stages):
        training = StageTraining(stages[:i], stage, lr=0.02, **options)
        for step in range(num_steps):
            training.step(batch(grid, step))
        states.append(whole(training.state()))
    return states


@pytest.mark.parametrize(
    ("shape", "num_steps", "options"),
    [((2, 1), 20, {}), ((2, 2), 10, {}), ((1, 2), 10, {"tied": False, "relu": True})],
)
def test_training_is_the_same_on_any_grid(shape, num_steps, options):
    (alone,) = on_grid((1, 1), lambda grid: trained(grid, num_steps=num_steps, **options))
    split, *others = on_grid(shape, lambda grid: trained(grid, num_steps=num_steps, **options))
    assert all(state is None for states in others for state in states)
    for state, expected in zip(split, alone, strict=True):
        assert state.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(state[name], expected[name], rtol=0, atol=1e-8)
    start = nine_layers(lone())
    for stage, state in zip(start, alone, strict=True):
        assert not torch.allclose(state["filters"], stage.filtering.weight, atol=0.003)


def trained_on_divided_data(
    comm: Communicator, num_nets: int, compression: str
) -> dict[str, Tensor] | None:
    """A stage's state, on the first worker of each net; epochs of uneven micro-batches."""
    mesh = comm.mesh(data=num_nets, model=comm.size // num_nets)
    grid = Grid(mesh["model"])
    (stage, *_) = nine_layers(grid)
    model = SparseAutoencoder(stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    exchange = allstep.attach(model, mesh["data"], allstep.Synchronous(compression=compression))
    pictures = local_shard(grid, values(23, 2, SIDE, SIDE), stage.in_layout)
    loader = allstep.data.loader(
        TensorDataset(pictures), mesh["data"], global_batch=10, micro_batch=2
    )
    while loader.epoch < 3:
        for global_batch in allstep.steps(loader, exchange):
            for (x,) in global_batch:
                global_batch.backward(model(x))
            optimizer.step()
            optimizer.zero_grad()
            model.project()
    return whole({"filters": stage.divided(stage.filtering.weight), "scale": model.scale.detach()})


@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_exact_sums_over_nets_have_the_bits_of_one_net(num_workers):
    """Of one worker or two; the control's float sums differ."""

    def nets(num_nets: int, compression: str) -> list[dict[str, Tensor]]:
        size = num_nets * num_workers
        found = run_ranks(size, lambda comm: trained_on_divided_data(comm, num_nets, compression))
        return [state for state in found if state is not None]

    (one,) = nets(1, "exact")
    for num_nets in (2, 3):
        found = nets(num_nets, "exact")
        assert len(found) == num_nets
        assert not any(differing_names(state, one) for state in found), num_nets
    assert differing_names(nets(2, "fp32")[0], nets(1, "fp32")[0])


def test_step_lowers_the_cost_and_keeps_filter_norms():
    stages = nine_layers(lone())
    training = StageTraining(stages[:0], stages[0], lr=0.05, tied=False)
    weight, decoder = stages[0].filtering.weight, training.autoencoder.decoder.weight
    costs = []
    for _ in range(30):
        costs.append(training.step(batch(lone(), 0)).item())
        for filters in (weight, decoder):
            torch.testing.assert_close(filters.norm(dim=-1), torch.ones_like(filters[..., 0]))
    assert costs[-1] < 0.8 * costs[0]
    assert not torch.allclose(weight, decoder)
    before = weight.detach().clone()
    training.autoencoder.project = lambda: None
    training.step(batch(lone(), 0))
    assert (weight.norm(dim=-1) - before.norm(dim=-1)).abs().max() > 1e-4


def test_stages_below_stay_bit_for_bit():
    def train(grid: Grid) -> None:
        stages = nine_layers(grid)
        x = batch(grid, 0)
        below = [{k: v.clone() for k, v in stage.state_dict().items()} for stage in stages]
        seen = [stages[: i + 1](x).detach().clone() for i in range(3)]
        training = StageTraining(stages[:2], stages[2], lr=0.05)
        for step in range(5):
            training.step(batch(grid, step))
        for i in range(2):
            for name, value in stages[i].state_dict().items():
                assert torch.equal(value, below[i][name])
                assert value.grad is None
            assert torch.equal(stages[: i + 1](x), seen[i])
        assert not torch.equal(stages[2].filtering.weight, below[2]["filtering.weight"])

    on_grid((2, 1), train)


def test_state_resumes_on_another_grid():
    def start(grid: Grid, num_steps: int) -> StageTraining:
        stages = nine_layers(grid)
        training = StageTraining(stages[:1], stages[1], lr=0.05)
        for step in range(num_steps):
            training.step(batch(grid, step))
        return training

    def go_on(grid: Grid) -> dict[str, Tensor] | None:
        training = start(grid, 0)
        part = training.autoencoder.stage.local_part
        training.load_state({name: part(x).clone() for name, x in half.items()})
        for step in range(3, 6):
            training.step(batch(grid, step))
        return whole(training.state())

    half = whole(start(lone(), 3).state())
    expected = whole(start(lone(), 6).state())
    for shape in ((1, 1), (2, 1)):
        found = on_grid(shape, go_on)[0]
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-12)
    half = {name: x if "momentum" not in name else x * 0 for name, x in half.items()}
    assert not torch.allclose(on_grid((1, 1), go_on)[0]["filters"], expected["filters"])


def test_full_tensor_and_local_shard():
    def there_and_back(grid: Grid) -> Tensor | None:
        layout = grid.split((5, 7))
        return full_tensor(grid, local_shard(grid, x, layout, first_dim=1), layout, first_dim=1)

    x = values(2, 5, 7, 3)
    found, *others = on_grid((2, 2), there_and_back)
    assert torch.equal(found, x) and others == [None] * 3


def test_negative_sparsity():
    (stage, *_) = nine_layers(lone())
    with pytest.raises(UsageError, match=r"`sparsity` \(=-1\) must be 0 or more"):
        SparseAutoencoder(stage, sparsity=-1)
