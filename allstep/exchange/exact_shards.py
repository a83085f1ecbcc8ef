"""Exact sums of gradients that FSDP2 adds up, and leaves in shards."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from allstep.comm import Communicator
from allstep.comm.reproducible import (
    ReproducibleSum,
    carried,
    digits_of_squares,
    sum_of_digits,
    sums_over_workers,
)
from allstep.exchange.exact_sums import ExactSums, OffGrid
from allstep.exchange.grid import LOOK_ALWAYS, largest_of_rows_of_part
from allstep.torch_classes import bounds_of, is_dtensor, is_first_copy, local_part


class ExactShards:
    """Rounds a worker's whole gradients before FSDP2 adds them up; completes the shards.

    [Note: exact shards] What is on the grid has the same sum in any order, so FSDP2 may make it. A
    gradient that is not is kept apart as digits, whole, until the global batch ends; all workers'
    digits are added then, and each keeps those of its shard. In the first steps, when nothing is
    on the grid and then much leaves it, they are added as soon as FSDP2 has reduced a module's
    gradients, so that nobody holds more whole ones than a module's at a time. It takes one more
    message for each module and pass, to learn what others keep apart.

    Args:
        comm: the workers.

    Attributes:
        sums: what rounds.
        off_grid: whole gradients of this worker, of FSDP2's parameters and of its own.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.sums = ExactSums(comm.device)
        self._is_open = False
        self._shards: Mapping[str, nn.Parameter] = {}
        self.off_grid: OffGrid = {}
        self._apart: OffGrid = {}  # all workers' of this worker's shards
        self._is_early = True  # so that gradients leave the grid often

    def begin(
        self,
        shards: Mapping[str, nn.Parameter],
        num_exchanges: int,
        num_micro_batches: int,
        num_passes: int,
    ) -> None:
        """Called at the start of a global batch.

        Args:
            shards: name -> this worker's shard of what FSDP2 has sharded.
            num_exchanges: so far.
            num_micro_batches: as for `Grid.begin`.
            num_passes: the same.
        """
        self._shards = {name: p for name, p in shards.items() if p.requires_grad}
        self.sums.begin(self.off_grid, num_micro_batches, num_passes)
        self._apart.clear()
        self._is_early = num_exchanges < LOOK_ALWAYS
        self._is_open = True

    def end(self) -> None:
        """It is over, or has failed; gradients that follow are FSDP2's."""
        self._is_open = False

    def round(self, name: str, whole: nn.Parameter, new: Tensor | None) -> Tensor | None:
        """The rounded gradient of a gathered parameter, which is added to `p.grad`.

        Args:
            name: the parameter's name.
            whole: the parameter that FSDP2 has gathered.
            new: its gradient, of this worker's micro-batch.
        """
        if new is None or not self._is_open or self.sums.take_call(name):
            return None
        return self.sums.round(self.off_grid, name, whole, new)

    def add_up_early(self, names: Sequence[str], _: Tensor) -> None:
        """After FSDP2 has added up the gradients of a module. Collective. [Note: exact shards]

        Args:
            names: of the module's parameters.
        """
        if not self._is_open:
            return
        self.sums.settle(self.off_grid)
        if self._is_early:
            self._add_up([name for name in names if name in self._shards])

    def complete(self, num_exchanges: int) -> None:
        """At the end of a global batch: the shards' gradients become the sums. Collective.

        Args:
            num_exchanges: so far.
        """
        self.sums.settle(self.off_grid)
        self._add_up(list(self._shards))
        for name, apart in self._apart.items():
            held = self._gradient(name)
            if held is not None:
                held.copy_(apart.total().add_(held))
        self._follow(num_exchanges)

    def sums_of_squares(self, parameters: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
        """The sums of squares for LAMB's and LARS's norms, independent of the shards. Collective.

        Args:
            parameters: shards of this model; the same on all workers, each as often.
            parts: of the parameters' form: this worker's part of one, or of its update.

        Returns:
            [len(parts)], float64.
        """
        own = torch.stack(
            [
                digits_of_squares(x if is_dtensor(p) and is_first_copy(p) else x.new_zeros(0))
                for p, x in zip(parameters, parts, strict=True)
            ]
        )
        return torch.stack([sum_of_digits(carried(x)) for x in self._comm.all_reduce(own)])

    def _add_up(self, names: Sequence[str]) -> None:
        """Takes what any worker keeps apart of some parameters. Collective."""
        is_off = torch.tensor([name in self.off_grid for name in names], dtype=torch.int32)
        is_off = self._comm.all_reduce(is_off.to(self._comm.device), "max")
        for name, flag in zip(names, is_off.tolist(), strict=True):
            if flag:
                self._add_up_one(name)

    def _add_up_one(self, name: str) -> None:
        p = self._shards[name]
        own = self.off_grid.pop(name, None) or ReproducibleSum(p)
        (of_all,) = sums_over_workers(self._comm, [own])
        part = of_all.part(tuple(map(slice, *bounds_of(p))))
        if name in self._apart:
            self._apart[name].add_sum(part)
        else:
            self._apart[name] = part

    def _follow(self, num_exchanges: int) -> None:
        """The next units follow the sums, of which each worker has seen its shards."""
        self.sums.num_completed += bool(self._apart)
        with_gradients = (name for name in self._shards if self._gradient(name) is not None)
        names = self.sums.grid.names_to_look_at(num_exchanges, with_gradients, self._apart)
        if not names:
            return
        tops = [self._largest_of_rows(name) for name in names]
        flat = torch.cat(tops).nan_to_num(nan=math.inf, posinf=math.inf)  # Gloo's max loses NaN
        flat = self._comm.all_reduce(flat, "max")
        parts = torch.split(flat, [len(top) for top in tops])
        self.sums.grid.follow(dict(zip(names, parts, strict=True)), self._apart.keys())

    def _largest_of_rows(self, name: str) -> Tensor:
        """The largest elements of a gradient's rows; 0 for rows on other workers only."""
        p, held = self._shards[name], self._gradient(name)
        assert held is not None
        return largest_of_rows_of_part(held, p.shape, bounds_of(p)[0][0] if p.dim() else 0)

    def _gradient(self, name: str) -> Tensor | None:
        """This worker's part, in the same memory."""
        gradient = self._shards[name].grad
        return None if gradient is None else local_part(gradient).detach()
