"""Forward and backward of nine layers on two workers, and on one of them alone, by turns.

    python benchmarks/model_parallel_worker.py POINT.json    # as a rank; started by the benchmark

Halo that is exposed is the time that a worker posts messages and waits for them, which includes
waiting for a slower neighbour.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import keep_heap, run_worker
from torch import nn

from allstep import Communicator
from allstep.comm import Work
from allstep.comm.batched_send_recv import BatchedSendRecv
from allstep.nn import AutoencoderStage, Grid
from allstep.nn.windows import local_shard

__all__ = ["BATCH", "NETS", "Shape", "run_point"]

BATCH = 96
PING_BYTES = 1 << 20
STEPS_A_TURN = 3  # the last counts: a step after a pause finds other data in the caches

# kernel, step, block, pool size, pool stride, norm size of each stage
Shape = tuple[int, int, tuple[int, int, int], int, int, int]
NETS: dict[str, tuple[int, int, tuple[Shape, ...]]] = {  # name: (pixels, channels, stages)
    "small": (
        24, 1,
        ((12, 2, (16, 2, 2), 2, 2, 5), (4, 1, (16, 2, 2), 2, 2, 3), (3, 1, (32, 2, 2), 2, 2, 3)),
    ),
    "medium": (
        96, 3,
        ((18, 3, (48, 1, 1), 3, 2, 5), (5, 1, (64, 1, 1), 2, 1, 3), (3, 1, (64, 1, 1), 2, 1, 3)),
    ),
    "large": (
        200, 3,
        ((18, 4, (48, 1, 1), 3, 2, 5), (5, 1, (64, 1, 1), 3, 1, 3), (3, 1, (64, 1, 1), 3, 1, 3)),
    ),
}  # fmt: skip


class Step:
    """A net on a grid, and one pass through it."""

    def __init__(self, grid: Grid, pixels: int, channels: int, shapes: Sequence[Shape]) -> None:
        layout, stages = grid.split((pixels, pixels)), []
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(BATCH, channels, pixels, pixels, generator=generator)
        self.x = local_shard(grid, x, layout).clone()
        for seed, (kernel, step, block, pool, stride, norm) in enumerate(shapes):
            stage = AutoencoderStage(
                grid, layout, channels, kernel, step, block,
                pool_size=pool, pool_stride=stride, norm_size=norm, seed=seed,
            )  # fmt: skip
            stages.append(stage)
            layout, channels = stage.out_layout, block[0]
        self.grid = grid
        self.net = nn.Sequential(*stages)

    def __call__(self) -> tuple[float, float]:
        """Seconds of forward to the objective, and of the full backward."""
        start_s = time.perf_counter()
        loss = self.net(self.x).square().sum()
        middle_s = time.perf_counter()
        loss.backward()
        end_s = time.perf_counter()
        self.net.zero_grad(set_to_none=False)
        return middle_s - start_s, end_s - middle_s

    @property
    def flops(self) -> int:
        """Of the matrix products on this worker: three a filter, two where no input needs it."""
        sizes = [stage.filtering.weight.numel() for stage in self.net]
        return 2 * BATCH * (3 * sum(sizes) - sizes[0])

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.net.parameters())


class _Counted:
    """A work whose waits are counted."""

    def __init__(self, work: Work[Any], count: Callable[[Callable[[], Any]], Any]) -> None:
        self._work, self._counted = work, count

    def wait(self, timeout_s: float | None = None) -> Any:
        return self._counted(lambda: self._work.wait(timeout_s))

    def is_completed(self) -> bool:
        return self._work.is_completed()


class Exposed:
    """Counts the seconds in which windows post messages and wait for them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        exchange = BatchedSendRecv.exchange

        def timed(parcels: BatchedSendRecv, *args: Any, **options: Any) -> Any:
            return _Counted(self._count(lambda: exchange(parcels, *args, **options)), self._count)

        BatchedSendRecv.exchange = timed  # type: ignore[method-assign]

    def _count(self, call: Callable[[], Any]) -> Any:
        start_s = time.perf_counter()
        result = call()
        self.seconds += time.perf_counter() - start_s
        return result


def measure(comm: Communicator, repeats: int) -> dict[str, Any]:
    """What rank 0 reports, of every net."""
    exposed = Exposed()
    return {"link": _link(comm)} | {
        name: _measure_net(comm, exposed, repeats, *net) for name, net in NETS.items()
    }


def _measure_net(
    comm: Communicator, exposed: Exposed, repeats: int, *net: Any
) -> dict[str, list[float] | int]:
    split = Step(Grid(comm), *net)
    alone = Step(Grid(Communicator.single_process()), *net) if comm.rank == 0 else None
    row: dict[str, Any] = {
        "alone_forward_s": [], "alone_backward_s": [], "forward_s": [], "backward_s": [],
        "exposed_s": [],
    }  # fmt: skip
    for repeat in range(-1, repeats):
        times = (0.0, 0.0)
        for _ in range(STEPS_A_TURN if alone is not None else 0):
            times = alone()
        comm.barrier()  # the others sleep until rank 0 has done its steps alone
        for _ in range(STEPS_A_TURN):
            split.grid.stats, exposed.seconds = type(split.grid.stats)(), 0.0
            own_times = split()
        everyone = comm.all_gather(torch.tensor([*own_times, exposed.seconds]))
        slowest = torch.stack(everyone).amax(0).tolist()
        if repeat >= 0:
            for key, value in zip(row, (*times, *slowest), strict=True):
                row[key].append(value)
    stats = split.grid.stats
    if alone is not None:
        row["num_parameters"], row["flops"] = alone.num_parameters, alone.flops
    row["sent_bytes"], row["messages"] = stats.bytes_sent, stats.messages_sent
    return row


def _link(comm: Communicator) -> dict[str, float]:
    """Latency and bytes per second from one worker to the other, as halos travel."""
    parcels, other = BatchedSendRecv(comm), 1 - comm.rank
    options: Any = {"dtype": torch.uint8, "device": torch.device("cpu"), "verb": "ping"}
    seconds = []
    for num_bytes in (8, PING_BYTES):
        ping, times = torch.zeros(num_bytes, dtype=torch.uint8), []
        for _ in range(20):
            start_s = time.perf_counter()
            for sender in (0, 1):
                outgoing = {other: ping} if comm.rank == sender else {}
                incoming = {other: (num_bytes,)} if comm.rank != sender else {}
                parcels.exchange(outgoing, incoming, **options).wait()
            times.append((time.perf_counter() - start_s) / 2)
        seconds.append(min(times))
    latency_s, long_s = seconds
    return {"latency_s": latency_s, "bytes_per_s": PING_BYTES / (long_s - latency_s)}


def run_point(run: Callable[..., None], repeats: int, folder: Path) -> dict[str, Any]:
    """Measures with ranks that `run(command, timeout_s=…)` starts."""
    file = folder / "point.json"
    file.write_text(json.dumps(repeats))
    run([sys.executable, __file__, file], timeout_s=1200)
    measured: dict[str, Any] = json.loads(file.with_suffix(".measured").read_text())
    return measured


def main() -> None:
    file = Path(sys.argv[1])
    keep_heap()
    repeats = json.loads(file.read_text())
    run_worker(lambda comm: measure(comm, repeats), file.with_suffix(".measured"))


if __name__ == "__main__":
    main()
