"""A training that continues when workers are lost, and when new ones join.

[Note: elastic training] Between two steps a training with exact sums has the same state on every
worker, in memory. A step changes parameters only once all its sums over the workers have arrived:
gradients, batch norm's statistics, the loss. So when a worker is lost, each of the others is either
before that step or behind it, never in between: what the step has touched before its update
(buffers, the grid, the position in the data) was saved at its start, and is restored. Workers that
are a step behind, and those that join, get the state of the most advanced one; then all continue as
a resumed training does on another number of workers, but without a disk. A step that no worker has
completed is run again as a whole, by the present workers. So each sample counts once, and the
result has the bits of an undisturbed training.
"""

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from allstep import __version__
from allstep.comm import (
    Communicator,
    DividedModules,
    JoinedWork,
    StageModules,
    Work,
    shards_of,
)
from allstep.comm.agreement import digest
from allstep.comm.membership import Membership, regroup
from allstep.data import MapLoader
from allstep.data.batches import GlobalBatchLoader
from allstep.data.processes import LoaderProcesses
from allstep.data.same_data import first_samples
from allstep.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    PeerLostError,
    UsageError,
    first_few,
)
from allstep.exchange import Exchange
from allstep.nn import GroupedBatchNorm
from allstep.torch_classes import is_dtensor
from allstep.train.checkpoint import receive_state, send_state
from allstep.train.options import TrainOptions
from allstep.train.stop import StepStopAgreement
from allstep.train.task import Task, all_stages

# The errors by which a lost worker shows; a disagreement is a mistake in the program instead.
LOST = (PeerLostError, CollectiveTimeoutError)
_MOST = 4  # differences that an error names


class WorkersWaitError(CommunicationError):
    """Raised on all workers when new ones are waiting to join."""


class StepCommit:
    """The message of each step by which elastic workers commit to it. [Note: elastic training]

    Args:
        comm: the workers.
        membership: this worker's membership.
        stop: the agreement by which the workers decide to stop.
    """

    def __init__(self, comm: Communicator, membership: Membership, stop: StepStopAgreement) -> None:
        self._comm = comm
        self._membership = membership
        self.stop = stop
        self._others_wait = False

    def commit(self, loss: Tensor) -> Work[Tensor]:
        """Sends the last message before the update, which waits for its result. Collective.

        Args:
            loss: this worker's part of the loss.

        Returns:
            A Work whose result is the whole loss, on every worker.
        """
        requests = self._membership.requests()
        if requests.signal is not None:
            self.stop.interrupts.request(requests.signal)
        flag = torch.full_like(loss.view(-1)[:1], float(requests.others_wait))
        told = torch.cat([loss.view(-1), self.stop.asked.to(loss), flag])

        def finish() -> Tensor:
            num_losses = loss.numel()
            self.stop.note(told[num_losses:-1])
            self._others_wait = bool(told[-1])
            return told[:num_losses].view_as(loss)

        return JoinedWork([self._comm.all_reduce(told, check=False, async_op=True)], finish)

    @property
    def others_wait(self) -> bool:
        """Whether workers were waiting to join at the last message; the same on all who got it."""
        return self._others_wait

    def let_in(self) -> None:
        """Called between two steps; ends the present generation if others wait to join.

        Raises:
            WorkersWaitError: on every worker alike.
        """
        if self._others_wait:
            raise WorkersWaitError("others wait to join")


def check_elastic(options: TrainOptions) -> None:
    """Refuses options with state that exists on one worker only and would be lost with it.

    Raises:
        UsageError: names the option and the cure.
    """
    reasons = {
        "compression": options.compression != "exact"
        and "what is summed otherwise depends on who"
        ' sums, and residuals go with their worker; set "exact"',
        "staleness": options.staleness and "gradients in flight go with their worker; set 0",
        "sync_every": options.sync_every is not None
        and "between two averages each worker has a model of its own; leave it out",
        "noise_scale_every_steps": options.noise_scale_every_steps
        and "what was measured goes with its worker; set 0",
        "compile": options.compile
        and "each change of workers would compile anew, with other last bits maybe; leave it out",
        "shares": options.shares not in ("equal", "measured")
        and "there would be no share for other numbers of workers; set equal or measured",
    }
    for name, reason in reasons.items():
        if reason:
            raise UsageError(f"`{name}` (={getattr(options, name)!r}) can't be elastic: {reason}.")


def check_backend(comm: Communicator) -> None:
    """Refuses a backend whose kernels wait for a lost worker. [Note: elastic workers on a GPU]

    Raises:
        UsageError: names the cure.
    """
    if comm.size > 1 and comm.wire.transport_device(comm.device).type != "cpu":
        raise UsageError(
            f"`elastic`: the workers' process group has a backend for {comm.device.type} that does"
            " not let go of a lost worker: call `allstep.init` without `process_group` under"
            " `allstep launch --elastic`, or leave it out and resume from checkpoints."
        )


def check_whole(model: nn.Module, where: str, cure: str) -> None:
    """Refuses a model that is divided over workers, even with a single one: others may join.

    Raises:
        UsageError: names a parameter or module, and the cure.
    """
    sharded = (name for name, p in model.named_parameters() if is_dtensor(p))
    kinds = (DividedModules, StageModules)
    modules = (name for name, m in model.named_modules() if isinstance(m, kinds))
    for name in (*shards_of(model), *sharded, *modules):
        raise UsageError(
            f"{where}.{name}` is divided over workers, and its parts would go with one that is"
            f" lost; {cure}."
        )


def check_loop(loader: GlobalBatchLoader, exchanges: tuple[Exchange, ...]) -> None:
    """As `check_elastic`, for the loader and the exchanges of a user's own loop.

    Raises:
        UsageError: names the argument and the cure.
    """
    if not isinstance(loader, MapLoader):
        raise UsageError(
            "`loader` is of a stream, which would have to be read again from its start when workers"
            " change: give `allstep.data.loader` a map-style data set."
        )
    if not isinstance(loader.shares.how, str):
        raise UsageError(
            f"`loader` has `shares` (={list(loader.shares.how)}): there would be none for other"
            ' numbers of workers; set "equal" or "measured".'
        )
    for exchange in exchanges:
        check_backend(exchange.comm)
        check_whole(exchange.model, "`exchanges`: `model", "use `AutoCheckpoint`")
        policy = exchange.policy
        if exchange.comm is not loader.comm:
            raise UsageError("`exchanges` and `loader` must have the same communicator.")
        if not exchange.is_exact or policy.staleness or exchange.averaging is not None:
            raise UsageError(
                f"`exchanges` has the policy {policy!r}: what a worker has not sent yet would go"
                " with it, and what is not summed exactly depends on who sums; attach with"
                ' `allstep.Synchronous(compression="exact")`.'
            )
        if any(isinstance(m, GroupedBatchNorm) and m.has_peers for m in exchange.model.modules()):
            raise UsageError(
                "`exchanges`: the model has batch norm over several workers' micro-batches, which"
                " talks to them in the forward pass, in your code: use plain batch norm, whose"
                " statistics are of a micro-batch."
            )


def admit(comm: Communicator, membership: Membership, training: Mapping[str, object]) -> None:
    """Begins the first generation, or checks that this worker may join a later one.

    Args:
        comm: the first generation, or this worker only.
        membership: this worker's membership.
        training: name -> value of everything that workers must have in common to train together.

    Raises:
        UsageError: if this worker would train something else than the workers that it joins.
    """
    code = {"allstep": __version__, "torch": torch.__version__, "script": _script_digest()}
    own = "\n".join(_lines({**code, **training}))
    if not membership.waits:
        membership.begin(comm)
        if comm.rank == 0:
            membership.publish("training", own)
        return
    theirs, ours = membership.read("training").splitlines(), own.splitlines()
    if set(theirs) != set(ours):
        raise UsageError(
            f"This worker can't join: it has {_in_one_only(ours, theirs)}, the others have"
            f" {_in_one_only(theirs, ours)}. Start it with the same code, recipe and data."
        )


def _lines(values: Mapping[str, object], path: str = "") -> Iterator[str]:
    """One line for each value; mappings are descended into."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _lines(value, f"{path}{name}: ")
        else:
            yield f"{path}{name} {value!r}".replace("\n", " ")


def _in_one_only(lines: list[str], others: list[str]) -> str:
    """The first few of the lines that are not among the others."""
    return first_few([line for line in lines if line not in others], _MOST) or "nothing more"


def _script_digest() -> str | None:
    """Digest of the script that was started, without its imports; None if there is no script."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None or not Path(file).is_file():
        return None
    content = Path(file).read_bytes()
    if content.startswith(b"#!"):  # the path of the interpreter may differ between hosts
        content = content.partition(b"\n")[2]
    return f"{digest(content):016x}"


def training_of(task: Task, options: TrainOptions) -> dict[str, object]:
    """Everything that workers must have in common to train a task together."""
    return {
        "Python's class of options": type(options).__qualname__,
        "options": asdict(options),
        "parameters": parameters_of(task.model),
        "trained": {name: p.requires_grad for name, p in task.model.named_parameters()},
        **{
            f"stages[{n}].{name}": _in_words(
                getattr(stage, name), options, tells_epoch=name == "train_set"
            )
            for n, stage in enumerate(all_stages(task, options))
            for name in ("train_set", "test_set")
        },
    }


def _in_words(
    dataset: Dataset[Any], options: TrainOptions, *, tells_epoch: bool
) -> tuple[object, object]:
    """Length of a data set, and the contents of its first samples."""
    processes = LoaderProcesses(num_workers=options.loader_workers)
    length = getattr(dataset, "__len__", lambda: "?")()
    return length, first_samples(dataset, processes, options.seed, tells_epoch=tells_epoch)


def parameters_of(model: nn.Module) -> dict[str, tuple[int, list[int], str]]:
    """name -> place, shape and dtype of each."""
    return {
        name: (place, list(p.shape), str(p.dtype))
        for place, (name, p) in enumerate(model.named_parameters())
    }


def go_on(
    comm: Communicator, membership: Membership, state: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """Forms the next generation, all with the state of the most advanced worker. Collective.

    Args:
        comm: the present generation; the next one afterwards.
        membership: this worker's membership.
        state: state of this worker's training between two steps; None if it has not begun.

    Returns:
        The state to continue from; None if no worker has begun.
    """
    while True:
        regroup(comm, membership, _progress(state))
        with suppress(*LOST):  # another worker may be lost meanwhile
            return _shared(comm, membership, state)


def _shared(
    comm: Communicator, membership: Membership, state: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """The state of rank 0, the most advanced worker; a worker that is as far keeps its own."""
    tell_who_goes_on(comm, None if state is None else state["loader"]["steps"])
    if len({member.progress for member in membership.members}) == 1:
        return state
    if comm.rank == 0:
        send_state(comm, state)
        return state
    received: Mapping[str, Any] | None = receive_state(comm)
    return received


def tell_who_goes_on(comm: Communicator, step: int | None) -> None:
    """Logs on rank 0 how many workers continue, and from which step; None if none has begun."""
    if comm.rank == 0:
        workers = "1 worker goes on" if comm.size == 1 else f"{comm.size} workers go on"
        where = "from the start" if step is None else f"from step {step}"
        logging.getLogger("allstep").info(f"{workers} {where}")


def _progress(state: Mapping[str, Any] | None) -> int:
    """A number that grows with each step and at the end of an epoch; -1 before the start."""
    if state is None:
        return -1
    steps: int = state["loader"]["steps"]
    return steps + int(state["ended_epoch"]) + int(state["evaluated_epoch"])
