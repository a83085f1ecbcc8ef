"""The steps of the slow-wire panel, as each of the two workers runs them."""

import timeit
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from allstep.comm import Communicator
from allstep.doctor import (
    Effort,
    ShapedCommunicator,
    TokenBucket,
    Training,
    measure_collectives,
    measure_copy_s_per_byte,
    measure_workload,
    slowest_s,
)
from allstep.exchange import Exchange, Stale, Synchronous, attach, ddp_hook
from allstep.plan import Workload

MIB = 2**20
BUCKET_BYTES = MIB
_WIDTH, _NUM_LAYERS = 512, 8  # a layer is a bucket
NUM_PARAMS = _NUM_LAYERS * _WIDTH**2
_COMPUTE_S = 0.2
_FIRST_STEPS, _NUM_REPEATS, _NUM_STEPS, _NUM_ALONE = 3, 3, 3, 9
_EFFORT = Effort(bucket_sizes_bytes=(MIB // 4, MIB, 4 * MIB), num_rounds=_NUM_REPEATS)
KINDS = (("fp32", "native"), ("fp16", "recursive_doubling"))  # what two hosts do by themselves

WAYS = {
    "alone": None,
    "plain": Synchronous(plain=True),
    "DDP": None,
    "fp16": Synchronous(compression="fp16", bucket_bytes=BUCKET_BYTES),
    "fp16 + staleness 1": Stale(compression="fp16", steps=1, bucket_bytes=BUCKET_BYTES),
}


class _Trainer:
    """A model under one way to exchange."""

    def __init__(self, way: str, comm: Communicator, x: Tensor, *, hooks_ddp: bool) -> None:
        self._x = x
        torch.manual_seed(0)
        layers = [nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_NUM_LAYERS)]
        self._model: nn.Module = nn.Sequential(*(m for each in layers for m in (each, nn.ReLU())))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._exchange: Exchange | None = None
        policy = WAYS[way]
        if policy is not None:
            self._exchange = attach(self._model, comm, policy)
        elif way == "DDP":
            self._model = DistributedDataParallel(self._model)
            if hooks_ddp:
                hook = ddp_hook(Synchronous(algorithm="native"), comm)
                self._model.register_comm_hook(None, hook)

    def step(self) -> None:
        self._loss_of(self._model).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()

    def workload(self, comm: Communicator) -> Workload:
        """What a step computes, without any exchange."""
        training = Training(self._model, self._loss_of, self._optimizer)
        return measure_workload(comm, training, num_samples=len(self._x), num_steps=_NUM_ALONE)

    def _loss_of(self, model: nn.Module) -> Tensor:
        loss: Tensor = model(self._x).square().mean()
        return loss

    def drain(self) -> None:
        """Leaves the wire to others."""
        for _ in self._exchange.flush() if self._exchange is not None else ():
            pass


def run_steps(comm: Communicator, *, hooks_ddp: bool = False) -> dict[str, Any]:
    """Seconds of a step each way, of the slowest worker, and what a prediction needs."""
    torch.set_num_threads(1)
    timed = measure_collectives(comm, KINDS, _EFFORT)
    x = _make_batch(comm)
    trainers = {way: _Trainer(way, comm, x, hooks_ddp=hooks_ddp) for way in WAYS}
    for trainer in trainers.values():
        for _ in range(_FIRST_STEPS):
            trainer.step()
        trainer.drain()
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for repeat in range(_NUM_REPEATS):
        for way in list(WAYS) if repeat % 2 else list(reversed(WAYS)):
            seconds[way].append(_time_steps(trainers[way], comm))
    return {
        "step_s": {way: median(found) for way, found in seconds.items()},
        "workload": asdict(trainers["alone"].workload(comm)),
        "collectives": [asdict(each) for each in timed],
        "copy_s_per_byte": measure_copy_s_per_byte(comm),
    }


def run_steps_shaped(comm: Communicator, rate_bps: float) -> dict[str, Any]:
    """The same behind a token bucket."""
    shaped = ShapedCommunicator(comm, TokenBucket(rate_bps))
    return run_steps(shaped, hooks_ddp=True)


def _make_batch(comm: Communicator) -> Tensor:
    """As many samples as a worker computes for `_COMPUTE_S`; as many on all workers."""
    trial = 256
    for _ in range(3):
        x = torch.randn(trial, _WIDTH)
        trainer = _Trainer("alone", comm, x, hooks_ddp=False)
        own_s = min(timeit.repeat(trainer.step, number=1, repeat=4))
        trial = max(1, round(trial * _COMPUTE_S / slowest_s(comm, own_s)))
    return torch.randn(trial, _WIDTH)


def _time_steps(trainer: _Trainer, comm: Communicator) -> float:
    comm.barrier()
    trainer.step()  # with staleness there is something under way then
    own_s = timeit.timeit(trainer.step, number=_NUM_STEPS) / _NUM_STEPS
    trainer.drain()
    return slowest_s(comm, own_s)
