"""Networks on which steps are predicted, and their ranks, which measure.

    python benchmarks/predict_worker.py NETWORK.json     # as a rank; started by bench_predict.py

Rank 0 writes what they found beside NETWORK.json.
"""

import ctypes
import gc
import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import allstep
from allstep.comm import Communicator
from allstep.comm.algorithms import default_algorithm
from allstep.doctor import measure
from allstep.doctor.trial import (
    RunSteps,
    Training,
    measure_workload,
    sleeping_training,
    steps_under,
    time_steps,
    whole_rounds,
)
from allstep.doctor.workload import TimedStep, make_workload
from allstep.exchange.wires import make_wire
from allstep.plan import Workload
from allstep.plan.policies import DDP, MIB, PolicySpec

__all__ = ["LINKS", "Network"]

LINKS = {"100mbit": 100e6, "1gbit": 1e9, "10gbit": 10e9, "one_host": None}
NUM_LAYERS = 8
MOST_MB = 1600  # of models at once, on all hosts of this machine: 8 GB with their exchanges
FULL_STEPS = 8  # until late gradients are as late as they may be


@dataclass(frozen=True, kw_only=True)
class Network:
    """Hosts on links, or ranks of one host.

    Attributes:
        link: a key of `LINKS`.
        num_hosts: or ranks.
        models_mb: megabytes of float32 gradients of each model.
        seconds: of the timed steps of a policy.
    """

    link: str
    num_hosts: int
    models_mb: Sequence[int]
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.link} {self.num_hosts}"

    @property
    def rate_bps(self) -> float | None:
        """Of a link, each way; None for ranks of one host."""
        return LINKS[self.link]

    def wire_s(self, model_mb: int) -> float:
        """Seconds of float32 on the wire."""
        rate_bps = self.rate_bps or 20e9
        return 2 * (self.num_hosts - 1) / self.num_hosts * 8e6 * model_mb / rate_bps

    def compute_s(self, model_mb: int) -> float:
        """About what float32 takes on the wire, so that neither is all of a step."""
        return min(0.6, max(0.03, self.wire_s(model_mb)))


def compared_policies(comm: Communicator) -> list[PolicySpec]:
    """What is compared, with the algorithms that allstep takes on such hosts by itself."""
    own = PolicySpec(name="fp32", bucket_bytes=8 * MIB, first_bucket_bytes=MIB)
    policies = (
        own,
        replace(own, name="fp16", compression="fp16"),
        replace(own, name="int8", compression="int8"),
        replace(own, name="fp16 + staleness 1", compression="fp16", staleness=1),
        PolicySpec(name="local SGD, H = 4", bucket_bytes=None, sync_every=4),
    )
    return [DDP, *(replace(p, algorithm=_default_algorithm(comm, p.compression)) for p in policies)]


def _default_algorithm(comm: Communicator, wire: str) -> str:
    return default_algorithm(comm, make_wire(wire).dtype)


def run_rank(file: Path) -> None:
    """Measures a network's constants, then its models' steps; rank 0 writes it all."""
    torch.set_num_threads(1)
    network = Network(**json.loads(file.read_text()))
    with allstep.init(device="cpu") as comm:
        measurements = measure(comm)
        policies = compared_policies(comm)
        models = {str(mb): measure_model(comm, network, mb, policies) for mb in network.models_mb}
        if comm.rank == 0:
            measurements.write(file.with_suffix(".measurements"))
            file.with_suffix(".policies").write_text(json.dumps(list(map(asdict, policies))))
            file.with_suffix(".models").write_text(json.dumps(models))
        comm.barrier()


def measure_model(
    comm: Communicator, network: Network, model_mb: int, policies: Sequence[PolicySpec]
) -> dict[str, Any]:
    """The model's compute, and seconds of its steps under each policy."""
    num_elements, compute_s = model_mb * 250_000, network.compute_s(model_mb)
    if network.num_hosts == 2:
        make_training = real_training(comm, num_elements, compute_s)
    else:
        asleep = Workload.from_step(num_params=num_elements, step_s=compute_s)
        make_training = partial(sleeping_training, asleep)
    alone = make_training()
    timed: list[TimedStep] = []
    seconds: dict[str, list[float]] = {}
    num_repeats = 3 if network.wire_s(model_mb) > 2 else 9
    repeat_s = network.seconds / num_repeats
    time_alone = partial(time_steps, comm, alone, math.ceil(repeat_s / compute_s))
    num_at_once = MOST_MB // (model_mb * network.num_hosts)
    for start in range(0, len(policies), num_at_once):
        some = policies[start : start + num_at_once]
        _give_memory_back()
        with ExitStack() as stack:
            runs = [stack.enter_context(steps_under(comm, make_training(), p)) for p in some]
            timed += _time_in_turn(runs, some, time_alone, num_repeats, repeat_s, seconds)
    return {"workload": asdict(make_workload(timed, num_samples=1)), "seconds": seconds}


def _time_in_turn(
    runs: Sequence[RunSteps],
    policies: Sequence[PolicySpec],
    time_alone: Callable[[], list[TimedStep]],
    num_repeats: int,
    repeat_s: float,
    seconds: dict[str, list[float]],
) -> list[TimedStep]:
    """Adds the policies' seconds to `seconds`; returns the steps without any exchange.

    In turn, since a shared machine is slower for seconds.
    """
    for run, policy in zip(runs, policies, strict=True):
        run(max(2, policy.sync_every))  # buckets are made anew after the first
    numbers = [whole_rounds(run, p, repeat_s) for run, p in zip(runs, policies, strict=True)]
    timed: list[TimedStep] = []
    for _ in range(num_repeats):
        timed += time_alone()
        for run, policy, num_steps in zip(runs, policies, numbers, strict=True):
            if policy.staleness:
                continue
            if num_steps > policy.sync_every:
                run(policy.sync_every)  # fills caches
            seconds.setdefault(policy.name, []).extend(run(num_steps))
    for run, policy, num_steps in zip(runs, policies, numbers, strict=True):
        if policy.staleness:  # a wire that can't keep up is late by and by
            run(FULL_STEPS)
            seconds[policy.name] = run(num_steps, num_repeats)
    return timed


def _give_memory_back() -> None:
    """What earlier measurements used; glibc keeps what is freed, in pieces that it can't use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def real_training(
    comm: Communicator, num_elements: int, compute_s: float
) -> Callable[[], Training]:
    """Square layers, and a batch as large as it takes for `compute_s`, the same on all workers."""
    width = round((num_elements / NUM_LAYERS) ** 0.5)

    def make(x: torch.Tensor) -> Training:
        layers: list[nn.Module] = []
        for _ in range(NUM_LAYERS):
            layers += [nn.Linear(width, width, bias=False), nn.ReLU()]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        return Training(model, lambda net: net(x).mean(), optimizer)

    batch = 64
    for _ in range(3):
        trial = measure_workload(comm, make(torch.randn(batch, width)), num_samples=1, num_steps=5)
        step_s = comm.broadcast_object(trial.compute_s)
        batch = max(1, round(batch * compute_s / step_s))
    return partial(make, torch.randn(batch, width))


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
