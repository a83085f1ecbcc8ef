"""What a step of LAMB and LARS costs, against torch's fused AdamW and SGD and against peers.

    python benchmarks/bench_optim.py [--quick] [--device cuda]

108 M parameters in the shapes of BERT-base, and those of ResNet-50, with random weights and
gradients in single precision. All optimizers do the same: the groups of `allstep.optim.groups`
for ours (biases and normalisation neither decayed nor adapted), the like for the others. They
take turns step by step. Peers are measured where they are installed
(`pip install pytorch-optimizer==4.1.0 torch-optimizer==0.3.0 timm==1.0.31`). Extra
memory is the highest during a step without weights, gradients and state, in a process of its own.
"""

import argparse
import ctypes
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import Estimate, estimate, interleave, print_headline, ratio, write_results
from optim_variants import FAMILIES, SHAPES, make_groups, with_own_gradients
from rich.console import Console
from rich.table import Table

LAMB_TARGET = 2.2
PEER_TARGET = 2.0
LARS_TARGET = 2.0
CUDA_TARGET = 1.6
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
ADAMW_PASSES = 7  # reads weight, gradient and two moments, writes three of them


def measure(
    family: str, device: str, repeats: int, *, slow: bool, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of a step, by variant and repeat; `slow` is whether to measure ours in all ways."""
    variants, shapes, weight_decay = FAMILIES[family]
    weights = make_groups(SHAPES[shapes](), device, weight_decay)
    steps = {}
    for name, make in variants().items():
        if not slow and name.endswith(", plain"):
            continue
        steps[name] = _synchronised(make(with_own_gradients(weights)), device)
    return interleave(steps, repeats, warmups=2, clock=clock)


def _synchronised(optimizer: torch.optim.Optimizer, device: str) -> Callable[[], None]:
    def step() -> None:
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def extra_memory_bytes(family: str, name: str, device: str) -> int:
    """The highest memory during a step, without weights, gradients and the optimizer's state."""
    if device == "cpu":
        command = [sys.executable, __file__, "--memory", family, name]
        return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return _extra_memory_bytes(family, name, device)


def _extra_memory_bytes(family: str, name: str, device: str) -> int:
    variants, shapes, weight_decay = FAMILIES[family]
    groups = make_groups(SHAPES[shapes](), device, weight_decay)
    if device == "cpu":
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what is freed
        base_bytes = _status_bytes("VmRSS")
    optimizer = variants()[name](groups)
    if device == "cuda":
        optimizer.step()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        return torch.cuda.max_memory_allocated() - before
    optimizer.step()
    state_bytes = sum(
        tensor.nbytes
        for values in optimizer.state.values()
        for tensor in values.values()
        if isinstance(tensor, torch.Tensor)
    )
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    optimizer.step()
    return max(0, _status_bytes("VmHWM") - base_bytes - state_bytes)


def _status_bytes(key: str) -> int:
    """A line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise KeyError(key)


def show(
    title: str, seconds: dict[str, list[float]], base: str, memory: dict[str, int]
) -> dict[str, dict[str, Any]]:
    """Prints the table; the rows as data."""
    table = Table("optimizer", "step, ms", f"over {base}", "extra memory, MB", title=title)
    rows = {}
    for name, values in seconds.items():
        time_s, slower = estimate(values), ratio(values, seconds[base])
        extra = f"{memory[name] / 1e6:.0f}" if name in memory else ""
        ms = Estimate(*(1e3 * x for x in (time_s.median, time_s.low, time_s.high)))
        table.add_row(name, f"{ms.median:.1f} [{ms.low:.1f}, {ms.high:.1f}]", _ratio(slower), extra)
        rows[name] = {
            "step_s": time_s.median,
            "interval_s": [time_s.low, time_s.high],
            "ratio": slower.median,
            "ratio_interval": [slower.low, slower.high],
            "extra_memory_bytes": memory.get(name),
        }
    Console().print(table)
    return rows


def _ratio(slower: Estimate) -> str:
    return f"{slower.median:.2f} [{slower.low:.2f}, {slower.high:.2f}]"


def copy_bytes_per_s(device: str, repeats: int) -> float:
    """Bytes read and written by a plain copy, in a second."""
    source = torch.randn(2**26, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()

    seconds = interleave({"copy": copy}, repeats, warmups=2)["copy"]
    return 2 * source.nbytes / estimate(seconds).median


def best_peer(seconds: dict[str, list[float]]) -> str | None:
    """The fastest of those that are installed."""
    peers = [name for name in seconds if name in ("pytorch_optimizer", "torch_optimizer", "timm")]
    return min(peers, key=lambda name: estimate(seconds[name]).median, default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="about half a minute on two cores")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, help="of torch; default: torch's own choice")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu on a busy machine")
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.memory:
        print(_extra_memory_bytes(*arguments.memory, device="cpu"))
        return
    device, repeats = arguments.device, 7 if arguments.quick else 31

    slow, clock = not arguments.quick, CLOCKS[arguments.clock]
    lamb = measure("lamb", device, repeats, slow=slow, clock=clock)
    lars = measure("lars", device, 3 * repeats, slow=slow, clock=clock)
    memory = {
        family: {name: extra_memory_bytes(family, name, device) for name in names}
        for family, names in {
            "lamb": ["AdamW, fused", "LAMB", *filter(None, [best_peer(lamb)])],
            "lars": ["SGD, fused", "LARS"],
        }.items()
    }
    rows = {
        "bert": show("108 M parameters, BERT-base", lamb, "AdamW, fused", memory["lamb"]),
        "resnet50": show("25.6 M parameters, ResNet-50", lars, "SGD, fused", memory["lars"]),
    }
    headline = {
        "lamb_vs_adamw": ratio(lamb["LAMB"], lamb["AdamW, fused"]).median,
        "lars_vs_sgd": ratio(lars["LARS"], lars["SGD, fused"]).median,
    }
    peer = best_peer(lamb)
    if peer is not None:
        headline["lamb_vs_best_peer"] = ratio(lamb[peer], lamb["LAMB"]).median
    num_bytes = 4 * sum(torch.Size(shape).numel() for shape in SHAPES["bert"]())
    floor_s = ADAMW_PASSES * num_bytes / copy_bytes_per_s(device, repeats)
    share = floor_s / estimate(lamb["LAMB"]).median
    print(f"seven passes at a copy's bandwidth take {share:.0%} of LAMB's step")
    path = write_results(
        "bench_optim" if device == "cpu" else f"bench_optim_{device}",
        {
            "repeats": repeats,
            "clock": arguments.clock,
            "targets": {
                "lamb_vs_adamw": LAMB_TARGET if device == "cpu" else CUDA_TARGET,
                "lamb_vs_best_peer": PEER_TARGET,
                "lars_vs_sgd": LARS_TARGET,
            },
            "best_peer": peer,
            "share_of_copy_bandwidth": share,
            "rows": rows,
        },
    )
    print(f"written to {Path(path).name}")
    print_headline(**headline)


if __name__ == "__main__":
    main()
