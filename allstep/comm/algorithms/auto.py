"""Chooses an all-reduce algorithm by measuring the possible ones."""

import time
from collections.abc import Callable, Iterable, Mapping
from statistics import mean
from typing import Any, ClassVar

import torch
from torch import Tensor

from allstep.comm.algorithms.base import AllReduce
from allstep.comm.algorithms.doubling import HalvingDoubling, RecursiveDoubling
from allstep.comm.algorithms.native import Native
from allstep.comm.algorithms.nodes import Hierarchical, TwoDimensional
from allstep.comm.algorithms.ring import Ring
from allstep.comm.algorithms.shared import SharedMemory
from allstep.comm.group import WorkerGroup
from allstep.device import is_accelerator, synchronize

_SIZES_BYTES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 23)
_REPEATS = 3
_ENOUGH_S = 0.1  # larger sizes are skipped if a sum takes longer: the network is slow


class Auto(AllReduce):
    """For each size of tensor the algorithm that was the fastest when this object was made.

    Every candidate sums tensors of a few sizes, as many at once as training will; only the
    backend's own runs several sums at the same time. A candidate's time is the mean over ranks, so
    every rank has the same figures and makes the same choice. (A sum takes equally long on all
    ranks; if many share cores, the slowest rank's time would only be an outlier.) Another candidate
    replaces the backend's own only if it is at least 5 % faster, since measurements are not more
    precise.

    Args:
        comm: the ranks.
        dtype: dtype of the tensors that are measured.
        num_at_once: number of tensors that are summed at once.
        measure: algorithm, tensor -> seconds of a sum on this rank; None to time it.

    Attributes:
        seconds: size in bytes -> name of a candidate -> seconds per tensor.
        choices: size in bytes -> name of the fastest; a tensor uses the choice of the nearest size,
            by ratio.
    """

    name: ClassVar[str] = "auto"

    def __init__(
        self,
        comm: WorkerGroup,
        dtype: torch.dtype = torch.float32,
        num_at_once: int = 1,
        measure: Callable[[AllReduce, Tensor], float] | None = None,
    ) -> None:
        super().__init__(comm)
        self._time = self._time_sum if measure is None else measure
        self._dtype, self._num_at_once = dtype, num_at_once
        self.seconds: dict[int, dict[str, float]] = {}
        self.choices: dict[int, str] = {}
        self._kinds: dict[str, type[AllReduce]] = {}
        self._algorithms: dict[str, AllReduce] = {}
        if comm.size > 1:
            self._kinds = {kind.name: kind for kind in _candidates(comm)}
            self._make(self._kinds)
            for size_bytes in _SIZES_BYTES:
                self.seconds[size_bytes] = self._measure(size_bytes)
                self.choices[size_bytes] = _fastest(self.seconds[size_bytes])
                if num_at_once * min(self.seconds[size_bytes].values()) > _ENOUGH_S:
                    break
            self._keep(self.choices.values())

    def _make(self, names: Iterable[str]) -> None:
        """Makes the algorithms that are missing, in an order that is the same on every rank."""
        for name in sorted(set(names) - self._algorithms.keys()):
            self._algorithms[name] = self._kinds[name](self.comm)

    def _keep(self, names: Iterable[str]) -> None:
        """Closes all algorithms but those in `names`."""
        for name in sorted(self._algorithms.keys() - set(names)):
            self._algorithms.pop(name).close()

    def _measure(self, size_bytes: int) -> dict[str, float]:
        """The seconds of each candidate, the same on every rank."""
        size = size_bytes // self._dtype.itemsize
        device = self.comm.wire.transport_device(self.comm.device)
        x = torch.zeros(size, dtype=self._dtype, device=device)
        names = list(self._algorithms)
        own = [self._time(self._algorithms[name], x) for name in names]
        by_name = zip(*self.comm.all_gather_object(own), strict=True)
        return {name: mean(seconds) for name, seconds in zip(names, by_name, strict=True)}

    def _time_sum(self, algorithm: AllReduce, x: Tensor) -> float:
        """Seconds of a sum, the least of a few measurements."""
        best_s = float("inf")
        for _ in range(_REPEATS):
            self.comm.barrier()
            start_s = time.perf_counter()
            self._sum(algorithm, x)
            synchronize(x.device)
            best_s = min(best_s, time.perf_counter() - start_s)
        return best_s / self._num_at_once

    def _sum(self, algorithm: AllReduce, x: Tensor) -> None:
        """Sums as many tensors of zeros as are summed at once in training."""
        if isinstance(algorithm, Native) and self._num_at_once > 1:
            for posted in [algorithm.post(x) for _ in range(self._num_at_once)]:
                posted.wait()
        else:
            for _ in range(self._num_at_once):
                algorithm.reduce_(x)

    def used_for(self, num_bytes: int) -> AllReduce:
        """The algorithm that sums a tensor of that size."""
        if not self.choices:
            return self  # there is only one rank
        num_bytes = max(1, num_bytes)
        nearest = min(self.choices, key=lambda size: max(size / num_bytes, num_bytes / size))
        return self._algorithms[self.choices[nearest]]

    @property
    def in_words(self) -> str:
        """The measured sizes and the algorithm chosen for each."""
        return ", ".join(f"{size >> 10:,} KiB {name}" for size, name in self.choices.items())

    def state_dict(self) -> dict[str, Any]:
        return {"size": self.comm.size, "choices": dict(self.choices)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the choices of `state` if it is of as many ranks and all are possible here."""
        choices: dict[int, str] = state.get("choices", {})
        names = set(choices.values())
        if state.get("size") == self.comm.size and names <= self._kinds.keys():
            self._make(names)
            self._keep(names)
            self.choices = dict(choices)

    def _reduce_(self, flat: Tensor) -> None:
        self.used_for(flat.nbytes).reduce_(flat)

    @property
    def _parts(self) -> Iterable[AllReduce]:
        return self._algorithms.values()


def _candidates(comm: WorkerGroup) -> list[type[AllReduce]]:
    """The algorithms that may be the fastest for these ranks and nodes."""
    kinds: list[type[AllReduce]] = [Native, Ring, HalvingDoubling, RecursiveDoubling]
    if comm.num_nodes == 1 and not is_accelerator(comm.device):
        kinds.append(SharedMemory)
    local_sizes = set(comm.all_gather_object(comm.local_size))
    if comm.num_nodes > 1 and local_sizes != {1}:
        kinds.append(Hierarchical)
        if len(local_sizes) == 1:
            kinds.append(TwoDimensional)
    return kinds


def _fastest(seconds: dict[str, float]) -> str:
    best = min(seconds, key=lambda name: seconds[name])
    return best if seconds[best] < 0.95 * seconds[Native.name] else Native.name
