"""Sparse autoencoders on arrays that are split over workers, trained stage after stage."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import SGD

from allstep.comm import Communicator
from allstep.errors import UsageError
from allstep.nn.contrast import LocalContrastNorm
from allstep.nn.locally_connected import LocallyConnected2d, LocallyConnectedTranspose2d
from allstep.nn.pooling import L2Pool2d
from allstep.nn.replicated import replicated
from allstep.nn.windows import DividedTensor, Grid, Layout, Window, local_shard


class AutoencoderStage(nn.Module):
    """Three layers: local filtering, L2 pooling and local contrast normalisation.

    Filters have a norm of 1, at first and after every step of `StageTraining`.

    Args:
        grid: the workers; all of them must make and call the layer.
        in_layout: who owns what of the input.
        in_channels, kernel_size, stride, block: as `LocallyConnected2d`'s.
        pool_size, pool_stride: positions of a pool in each dim, and between two pools.
        norm_size: positions of the contrast normalisation's neighbourhood in each dim; odd.
        relu: let responses below zero be zero; else filtering is linear, as it was published.
        seed: of the initial filters; None to draw it from torch's default generator on rank 0.
        dtype: of the filters.

    Attributes:
        filtering, pooling, norm: the layers.
        out_layout: who owns what of the output.

    >>> from allstep.comm import Communicator
    >>> grid = Grid(Communicator.single_process())
    >>> stage = AutoencoderStage(
    ...     grid, grid.split((9, 9)), 3, 5, 2, (4, 2, 2), pool_size=2, pool_stride=2, norm_size=3
    ... )
    >>> stage(torch.ones(8, 3, 9, 9)).shape
    torch.Size([8, 4, 3, 3])

    Source: Le et al., 2012, arXiv:1112.6209, section 3; Coates et al., 2013.
    """

    def __init__(
        self,
        grid: Grid,
        in_layout: Layout,
        in_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int],
        block: Sequence[int],
        *,
        pool_size: int,
        pool_stride: int,
        norm_size: int,
        relu: bool = False,
        seed: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.filtering = LocallyConnected2d(
            grid, in_layout, in_channels, kernel_size, stride, block, False, seed=seed, dtype=dtype
        )
        self.pooling = L2Pool2d(grid, self.filtering.out_layout, pool_size, pool_stride)
        self.norm = LocalContrastNorm(grid, self.pooling.out_layout, norm_size)
        self.grid = grid
        self.relu = relu
        self.in_layout = in_layout
        self.out_layout = self.norm.out_layout
        normalise_filters(self.filtering.weight)

    @property
    def num_neurons(self) -> int:
        """The number of neurons of the filtering layer, on all workers together."""
        layer = self.filtering
        return layer.depth * Window.whole(layer.out_layout.shape).num_positions

    def responses(self, x: Tensor) -> Tensor:
        """The filters' responses: this worker's part, from its part of the input."""
        y: Tensor = self.filtering(x)
        return y.relu() if self.relu else y

    @torch.no_grad()
    def some_filters(self, numbers: Tensor) -> Tensor:
        """Some filters of all workers, the same on each. Collective.

        Args:
            numbers: of the filters, in the order of rows, columns and maps of the whole layer.

        Returns:
            [len(numbers), numbers of a receptive field].
        """
        weight, layout = self.filtering.weight, self.filtering.block_layout
        places = torch.unravel_index(numbers, (*layout.shape, weight.shape[2]))
        own = layout.windows[self.grid.rank]
        rows, columns, maps = (
            place - start for place, start in zip(places, (*own.start, 0), strict=True)
        )
        height, width = own.shape
        is_here = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
        chosen = weight.new_zeros(len(numbers), weight.shape[3])
        chosen[is_here] = weight[rows[is_here], columns[is_here], maps[is_here]]
        return self.grid.comm.all_reduce(chosen)

    def divided(self, x: Tensor, *, is_first_copy: bool = True) -> DividedTensor:
        """A tensor of the filters' shape as a divided leaf of a state."""
        layout = self.filtering.block_layout
        shape = (*layout.shape, *x.shape[len(layout.shape) :])
        x = x.detach()
        return DividedTensor(x, shape, x.dtype, layout.windows, self.grid.comm, is_first_copy)

    def local_part(self, whole: Tensor) -> Tensor:
        """This worker's part of a tensor of which `divided` is a leaf, a view; a number itself."""
        if not whole.dim():
            return whole
        return local_shard(self.grid, whole, self.filtering.block_layout, first_dim=0)

    def forward(self, x: Tensor) -> Tensor:
        """This worker's part of the output from its part of the input; see [Note: batch last]."""
        y: Tensor = self.norm(self.pooling(self.responses(x)))
        return y


class SparseAutoencoder(nn.Module):
    """The cost of a stage: the error of reconstructing its input from few active pools.

    cost = mean over samples of |x - decoder(scale * y)|^2 + sparsity * sum of pooling(y)

    where y are the filters' responses; the decoder is their transpose.

    Args:
        stage: whose filters are to be trained.
        sparsity: lambda in the papers.
        tied: decode with the same filters; else with a copy of them that is trained apart.

    Attributes:
        stage: the stage.
        decoder: a `LocallyConnectedTranspose2d`.
        scale: one number, learned, the same on all workers.

    >>> from allstep.comm import Communicator
    >>> grid = Grid(Communicator.single_process())
    >>> stage = AutoencoderStage(
    ...     grid, grid.split((6, 6)), 1, 3, 1, (4, 1, 1), pool_size=2, pool_stride=2, norm_size=3
    ... )
    >>> SparseAutoencoder(stage)(torch.zeros(8, 1, 6, 6)) < 0.001
    tensor(True)

    Source: Coates et al., 2013, section 3; `tied=False` as Le et al., 2012, arXiv:1112.6209.
    """

    def __init__(
        self, stage: AutoencoderStage, *, sparsity: float = 0.1, tied: bool = True
    ) -> None:
        super().__init__()
        if sparsity < 0:
            raise UsageError(f"`sparsity` (={sparsity}) must be 0 or more.")
        weight = stage.filtering.weight
        self.stage = stage
        self.decoder = LocallyConnectedTranspose2d(stage.filtering, tied=tied)
        self.scale = nn.Parameter(torch.ones((), dtype=weight.dtype, device=weight.device))
        self.sparsity = sparsity

    def forward(self, x: Tensor) -> Tensor:
        """This worker's part of the cost; the sum over workers is the whole of it.

        Args:
            x: [batch, in_channels, *its window's shape], this worker's part of the stage's input.
        """
        y = self.stage.responses(x)
        (scale,) = replicated(self.stage.grid.comm, [self.scale])
        assert scale is not None
        errors = self.decoder(scale * y) - x
        cost: Tensor = errors.square().sum() + self.sparsity * self.stage.pooling(y).sum()
        return cost / len(x)

    @torch.no_grad()
    def fit_scale(self, x: Tensor, data: Communicator | None = None) -> None:
        """Sets the scale to the best one for these samples; all workers call it.

        Args:
            x: this worker's part of the samples.
            data: workers with this part of other samples, which count as well.
        """
        decoded = self.decoder(self.stage.responses(x))
        sums = torch.stack([(decoded * x).sum(), decoded.square().sum()])
        self.stage.grid.comm.all_reduce(sums)
        above, below = sums if data is None else data.all_reduce(sums)
        self.scale.copy_(above / below.clamp_min(torch.finfo(below.dtype).tiny))

    def project(self) -> None:
        """Divides all filters, the decoder's too, by their norms."""
        normalise_filters(self.stage.filtering.weight)
        if self.decoder.weight is not self.stage.filtering.weight:
            normalise_filters(self.decoder.weight)


class StageTraining:
    """Trains one stage by SGD with momentum, on top of others that do not change.

    Args:
        below: what leads from the samples to the stage's input; it is frozen.
        stage: whose filters are trained.
        lr: learning rate for a receptive field of one number with a variance of 1; filters have
            lr / fan_in, the scale lr / num_neurons, as their curvatures grow with these.
        momentum: of both.
        sparsity, tied: as `SparseAutoencoder`'s.
        data: workers that have this one's filters and other samples; attach `autoencoder` to them.
        batch: samples of an update, over all of `data`; both or neither are given.

    Attributes:
        autoencoder: the stage's cost.
        optimizer: a `torch.optim.SGD`.

    >>> from allstep.comm import Communicator
    >>> grid = Grid(Communicator.single_process())
    >>> stage = AutoencoderStage(
    ...     grid, grid.split((6, 6)), 1, 3, 1, (4, 1, 1), pool_size=2, pool_stride=2, norm_size=3
    ... )
    >>> training = StageTraining(nn.Sequential(), stage, lr=0.1)
    >>> x = torch.randn(8, 1, 6, 6)
    >>> costs = [training.step(x).item() for _ in range(20)]
    >>> costs[-1] < costs[0]
    True
    """

    def __init__(
        self,
        below: nn.Module,
        stage: AutoencoderStage,
        *,
        lr: float,
        momentum: float = 0.9,
        sparsity: float = 0.1,
        tied: bool = True,
        data: Communicator | None = None,
        batch: int | None = None,
    ) -> None:
        if (data is None) != (batch is None):
            raise UsageError(f"`data` and `batch` (={batch}) go together: pass both or neither.")
        self._data = data
        self._batch = batch
        self._below = below.requires_grad_(False)
        self.autoencoder = SparseAutoencoder(stage, sparsity=sparsity, tied=tied)
        stage.requires_grad_(True)
        scale = self.autoencoder.scale
        filters = [p for p in self.autoencoder.parameters() if p is not scale]
        groups = [
            {"params": filters, "lr": lr / stage.filtering.weight.shape[3]},
            {"params": [scale], "lr": lr / stage.num_neurons},
        ]
        self.optimizer = SGD(groups, lr=lr, momentum=momentum)
        self._has_scale = False

    def step(self, x: Tensor) -> Tensor:
        """One update on a batch; all workers call it.

        Args:
            x: this worker's part of the samples.

        Returns:
            This worker's part of the cost before the update; the sum over all workers is the whole.
        """
        with torch.no_grad():
            x = self._below(x)
        if not self._has_scale:
            self.autoencoder.fit_scale(x, self._data)
            self._has_scale = True
        cost: Tensor = self.autoencoder(x)
        if self._data is None or self._batch is None:
            cost.backward()  # type: ignore[no-untyped-call]
        else:  # the sum over workers is the mean over samples, and they take the gradients' mean
            cost = cost * (len(x) / self._batch)
            (cost * self._data.size).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.autoencoder.project()
        return cost.detach()

    def state(self) -> dict[str, Tensor | DividedTensor]:
        """Parameters and momentum, those of filters divided over the workers.

        Any number of workers can go on from it, by `load_state`.
        """
        state: dict[str, Tensor | DividedTensor] = {}
        for name, parameter in self._parameters():
            momentum = self.optimizer.state[parameter].get("momentum_buffer")
            if momentum is None:
                momentum = torch.zeros_like(parameter)
            state |= {name: self._leaf(parameter), f"{name}.momentum": self._leaf(momentum)}
        return state

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Loads a result of `state`, each tensor as the stage's `local_part` of it."""
        for name, parameter in self._parameters():
            parameter.copy_(state[name])
            momentum = state[f"{name}.momentum"].to(parameter)
            self.optimizer.state[parameter]["momentum_buffer"] = momentum.contiguous()
        self._has_scale = True

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters by their names in a checkpoint."""
        autoencoder = self.autoencoder
        named = [("filters", autoencoder.stage.filtering.weight), ("scale", autoencoder.scale)]
        if autoencoder.decoder.weight is not autoencoder.stage.filtering.weight:
            named.append(("decoder", autoencoder.decoder.weight))
        return named

    def _leaf(self, x: Tensor) -> Tensor | DividedTensor:
        if not x.dim():
            return x.detach().clone()
        is_first_copy = self._data is None or self._data.rank == 0
        return self.autoencoder.stage.divided(x, is_first_copy=is_first_copy)


@torch.no_grad()
def normalise_filters(weight: Tensor) -> None:
    """Divides each filter, the last dim, by its norm."""
    norm = torch.linalg.vector_norm(weight, dim=-1, keepdim=True)
    weight.div_(norm.clamp_min(torch.finfo(weight.dtype).tiny))
