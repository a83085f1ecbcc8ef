"""A user's own loop over `steps` that goes on without workers that are lost, and with others.

[Note: elastic loops] As in [Note: elastic training], each worker is before a step's update or
behind it. But the update is the user's code, which nobody can make for a worker from outside, and
what stands between two calls of allstep can't be run again. So a worker of a loop is in one of
three places of a step:

- at its start: before the user gets the global batch;
- in the loop over its micro-batches. If a worker is lost, what a step touches before its update
  (buffers, gradients, the grid, the position in the data) is put back, and the loop over the batch
  begins again, with the micro-batches that this worker has among those who are left;
- in the last message before the update, with all sums. If one of the others has got that message,
  all have had their sums: this worker makes its update as if nothing had been, and meets the others
  afterwards. If nobody has, the loop over the batch begins again.

`batch.backward` is where a loss is noticed in the user's code: it returns, and the loop over the
batch goes on with the first micro-batch. What `Elastic.call` is given is run again in the same way.
Workers that join are let in at the start of a step only, where all the others are, or will be after
their update: they run the same code from there on.
"""

import json
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from allstep.comm.membership import Membership, regroup
from allstep.data import GlobalBatch
from allstep.data.batches import GlobalBatchLoader
from allstep.env import read_launch
from allstep.errors import PeerLostError, UsageError, check_integer
from allstep.exchange import Exchange
from allstep.train.checkpoint import Stateful, check_same, receive_state, send_state
from allstep.train.elastic import (
    LOST,
    StepCommit,
    admit,
    check_loop,
    parameters_of,
    tell_who_goes_on,
)
from allstep.train.loop_state import BeforeStep, LoopState
from allstep.train.stop import Interrupts

_PLACES = 1 << 20  # in a step, at most: its start, its batch, its last message, then calls


class Elastic:
    """Makes a loop over `steps` one that goes on when workers are lost, and when others join.

    While entered, nobody waits for a worker that has ended: the others run the step that was under
    way again, among themselves, as a whole; each sample counts once. A worker that joins gets the
    models, `state` and the position in the data from another when it enters. The bits are those of
    one worker that nobody has disturbed. All workers run the same script, started by
    `allstep launch --elastic`; a lone process, too, may use it. See [Note: elastic loops].

    Code in the loop over a batch may be run again, for other micro-batches; `batch.attempt` counts.
    Code outside of it must not talk to other workers: `batch.global_loss()` may be called.

    Args:
        loader: from `allstep.data.loader`, of a map-style data set.
        exchanges: from `allstep.attach`, with `Synchronous(compression="exact")`, as `steps` gets
            them.
        state: name -> what else the next step depends on, by its `state_dict` and
            `load_state_dict`: the optimizers, schedulers of rates, a GradScaler.

    Raises:
        UsageError: if an argument is of a wrong kind, if what a worker keeps for itself would be
            lost with it, on accelerators, or if the launcher ends all workers when one fails.

    Example:
        >>> import torch, allstep
        >>> from torch.utils.data import TensorDataset
        >>> comm = allstep.init(device="cpu")
        >>> model = torch.nn.Linear(3, 1)
        >>> exchange = allstep.attach(model, comm, allstep.Synchronous(compression="exact"))
        >>> samples = TensorDataset(torch.randn(10, 3), torch.randn(10, 1))
        >>> loader = allstep.data.loader(samples, comm, global_batch=4, micro_batch=2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with allstep.Elastic(loader, exchange, state={"optimizer": optimizer}) as elastic:
        ...     for epoch in elastic.epochs(2):
        ...         for batch in allstep.steps(loader, exchange, elastic=elastic):
        ...             for x, y in batch:
        ...                 batch.backward(torch.nn.functional.mse_loss(model(x), y))
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        >>> loader.step
        6
    """

    def __init__(
        self, loader: GlobalBatchLoader, *exchanges: Exchange, state: Mapping[str, Stateful]
    ) -> None:
        self._state = LoopState(loader, exchanges, state)
        check_loop(loader, exchanges)
        self._loader, self._exchanges = loader, exchanges
        self._comm = exchanges[0].comm
        self._interrupts = Interrupts()  # what the launcher asks; signals are the user's
        self._membership: Membership | None = None
        launch = read_launch()
        if launch.launcher != "none" or self._comm.size > 1:
            self._membership = Membership(
                launch,
                grace_s=self._comm.timeout_s,
                rejoins=False,  # in the midst of the user's code
                lets_in=lambda progress: progress % _PLACES == 0,
            )
            self._commit = StepCommit(self._comm, self._membership, self._interrupts)
        self._is_entered = self._is_in_epochs = False
        self._step: int | None = None  # None before it has begun, or has joined
        self._place = 0  # in the step
        self._is_committing = False
        self._is_behind_batch = False  # or behind all of an epoch
        self._has_changed = False  # workers, since the exchanges and the loader were told
        self._between: dict[str, Any] = {}
        self._before: list[BeforeStep] = []
        self._last: tuple[str, str] | None = None  # what was committed last, by its name

    def __enter__(self) -> Self:
        if self._is_entered:
            raise UsageError("An Elastic is entered once; make another one.")
        self._is_entered = True
        self._between = self._position()
        if self._membership is None:
            return self
        admit(self._comm, self._membership, self._training())
        if self._membership.waits:
            self._change_workers()
            self._be_ready()
        self._step = self._loader.step
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is not None or self._membership is None:
            return
        self._enter(self._loader.step, 1)
        self._between = self._position()
        while True:
            try:
                self._take_up_workers()
                self._comm.barrier()
                break
            except LOST:
                if self._membership.is_over:  # for the others it is
                    break
                self._change_workers()
        self._membership.end()

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """The epochs that are still to come; for a worker that joins, from the others' present one.

        Each belongs to one loop over `steps`. A worker that joins in the midst of one has run what
        comes before that loop, too.

        Args:
            num_epochs: of the whole training.

        Yields:
            Epochs before this one.

        Raises:
            UsageError: outside of `with`, or if `num_epochs` is not positive.
        """
        check_integer("num_epochs", num_epochs)
        if not self._is_entered:
            raise UsageError("`epochs` is for `with Elastic(…) as elastic:`.")
        self._is_in_epochs = True
        return self._epochs(num_epochs)

    def _epochs(self, num_epochs: int) -> Iterator[int]:
        while self._loader.epoch < num_epochs:
            self._is_behind_batch = False
            yield self._loader.epoch

    def call(self, function: Callable[[], Any]) -> Any:
        """Calls what talks to other workers, such as an evaluation; again if one is lost meanwhile.

        All workers call it, behind the loop over a batch, or behind that over `steps`. The function
        must not change what the next step depends on; what is cut for the workers that there are,
        such as an `Evaluator`, it makes itself.

        Args:
            function: returns plain data, as JSON has it.

        Returns:
            That.

        Raises:
            UsageError: elsewhere, where a worker that joins might come alone, or for what is no
                plain data.
        """
        if not self._is_behind_batch:
            raise UsageError(
                "`call` belongs behind the loop over a global batch, or behind that over `steps`."
            )
        if self._membership is None:
            return json.loads(_plain(function()))
        text, place = None, self._place + 1
        self._between = self._position()
        while text is None:
            self._enter(self._step, place)
            try:
                self._take_up_workers()
                found = _plain(function())
                self._enter(self._step, place + 1, is_committing=True)
                self._comm.barrier()
                self._last, text = (self._name, found), found
            except LOST:
                text = self._text_of_others()
        return json.loads(text)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, for a file; each worker has the same."""
        return {**self._kept(), **self._position()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave, on any number of workers; before it is entered.

        Raises:
            UsageError: if it is entered: a worker that joins would go back, alone.
            CheckpointError: if it is of other data, another model or optimizer.
        """
        if self._is_entered:
            raise UsageError(
                "`load_state_dict` comes before `with`: a worker that joins runs it too."
            )
        self._load(state)
        self._loader.load_state_dict(state["loader"])
        for exchange, stored in zip(self._exchanges, state["exchange"], strict=True):
            exchange.load_state_dict(stored)

    # -- what `steps` asks for -------------------------------------------------------------------

    def begin_steps(self, loader: object, exchanges: tuple[Exchange, ...]) -> None:
        """Checks what `steps` was given.

        Raises:
            UsageError: if it is not the same, or outside of `epochs`.
        """
        self._state.check_given("elastic", loader, exchanges)
        if not self._is_in_epochs:
            raise UsageError(
                "`elastic` must know the epoch in which a worker joins: put `steps` in `for epoch"
                " in elastic.epochs(n):`, in `with Elastic(…) as elastic:`."
            )

    def global_batches(self) -> Iterator[GlobalBatch]:
        """The rest of the epoch; workers are let in before each."""
        epoch = self._loader.epoch
        while self._loader.epoch == epoch:
            self._begin_step()
            yield next(self._loader.global_batches())

    def _begin_step(self) -> None:
        self._state.refuse_left_out()
        self._enter(self._loader.step, 0)
        self._between, self._is_behind_batch = self._position(), False
        self._before.clear()
        if self._interrupts.requested is not None:
            signal.raise_signal(self._interrupts.requested)
        if self._membership is not None and self._commit.others_wait:
            self._change_workers()
        self._be_ready()

    def begin_pass(self) -> GlobalBatch | None:
        """Before a batch's micro-batches are run: another cut of it where workers have changed.

        Raises:
            PeerLostError, CollectiveTimeoutError: call `lose_workers`, then begin again.
        """
        if not self._before:
            self._enter(self._step, self._place + 1)
            self._before = [BeforeStep(exchange.model) for exchange in self._exchanges]
        elif self._is_committing:
            self._enter(self._step, self._place - 1)
        if not self._has_changed:
            return None
        for before in self._before:
            before.put_back()
        self._take_up_workers()
        return next(self._loader.global_batches())

    def commit(self, sums: Tensor) -> Tensor:
        """The last message before an update. Collective.

        Args:
            sums: this worker's parts.

        Returns:
            Their sums over the workers.

        Raises:
            PeerLostError, CollectiveTimeoutError: call `lose_workers`.
        """
        if self._membership is not None:
            self._enter(self._step, self._place + 1, is_committing=True)
            sums = self._commit.commit(sums)
            self._last = self._name, json.dumps(sums.tolist())
        self._is_behind_batch = True
        return sums

    def lose_workers(self) -> Tensor | None:
        """Goes on with those who are left. Collective.

        Returns:
            What `commit` would have returned, if others have got it; None to run the step again.

        Raises:
            PeerLostError: if too few are left, or if the launcher is gone.
        """
        text = self._text_of_others()
        if text is None:
            return None
        self._is_behind_batch = True
        return torch.tensor(json.loads(text), dtype=torch.float64)

    # -- changes of workers ----------------------------------------------------------------------

    @property
    def _progress(self) -> int:
        return -1 if self._step is None else _PLACES * self._step + self._place

    @property
    def _name(self) -> str:
        """Of what is committed at this place."""
        return f"committed/{self._step}/{self._place}"

    def _enter(self, step: int | None, place: int, *, is_committing: bool = False) -> None:
        """Comes to a place of a step; the same on all workers, one after the other."""
        self._step, self._place, self._is_committing = step, place, is_committing

    def _text_of_others(self) -> str | None:
        """Goes on with those who are left; returns what was committed, if others have got it."""
        was_committing, progress, name = self._is_committing, self._progress, self._name
        newest = self._change_workers()
        if not (was_committing and newest > progress):
            return None
        assert self._membership is not None
        return self._membership.read(name)

    def _change_workers(self) -> int:
        """Makes the next generation of workers; returns how far the most advanced is."""
        membership = self._membership
        assert membership is not None
        self._comm.abort()
        if not self._is_committing:  # else the user may still make an update
            for exchange in self._exchanges:
                exchange.detach()
        if self._last is not None:  # for a worker that has missed it
            membership.publish(*self._last)
        regroup(self._comm, membership, self._progress)
        self._commit = StepCommit(self._comm, membership, self._interrupts)
        self._has_changed = True
        newest = max(member.progress for member in membership.members)
        if newest < 0:
            raise PeerLostError(
                "All workers that had the training's state were lost before this one had joined."
            )
        tell_who_goes_on(self._comm, newest // _PLACES)
        return newest

    def _be_ready(self) -> None:
        """Takes up a change of workers, and the next one if another is lost meanwhile."""
        while self._has_changed:
            try:
                self._take_up_workers()
            except LOST:
                self._change_workers()

    def _take_up_workers(self) -> None:
        """Gives the state to those who have none, and tells exchanges and loader. Collective.

        Nobody goes on before all have the state: else who is left might not have that of between
        two steps any more.
        """
        if not self._has_changed:
            return
        assert self._membership is not None
        if any(member.progress < 0 for member in self._membership.members):
            self._share_state()
        self._loader.begin_again(self._between["loader"])
        for exchange, stored in zip(self._exchanges, self._between["exchange"], strict=True):
            exchange.begin_again(stored)
        if self._step is None:
            self._step = self._loader.step
        self._comm.barrier()
        self._has_changed = False

    def _share_state(self) -> None:
        if self._comm.rank == 0:
            assert self._step is not None
            send_state(self._comm, self._step, {**self._kept(), **self._between})
            return
        received = receive_state(self._comm)
        if self._step is None:
            assert received is not None
            self._load(received[1])

    def _position(self) -> dict[str, Any]:
        """Where loader and exchanges are."""
        return {
            "loader": self._loader.state_dict(),
            "exchange": [exchange.replicated_state() for exchange in self._exchanges],
        }

    def _kept(self) -> dict[str, Any]:
        """The rest of the state."""
        return {
            "options": self._state.options(),
            "models": self._state.models(),
            "gradients": self._state.gradients([True] * len(self._exchanges)),
            "state": {name: part.state_dict() for name, part in self._state.parts.items()},
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        check_same(state["options"], self._state.options())
        self._state.load(state["models"], state["state"])
        self._state.load_gradients(state["gradients"])
        self._between = {name: state[name] for name in ("loader", "exchange")}

    def _training(self) -> dict[str, object]:
        """What must be the same for workers to train together."""
        return {
            "data and state": self._state.options(),
            "policies": [exchange.policy.in_words for exchange in self._exchanges],
            "parameters": [parameters_of(exchange.model) for exchange in self._exchanges],
            "threads": torch.get_num_threads(),
        }


def _plain(found: object) -> str:
    """Plain data as a text.

    Raises:
        UsageError: for what is none.
    """
    try:
        return json.dumps(found)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"`function` returned what is no plain data ({error}); return numbers, such as"
            " `float(tensor)`, in lists or dicts."
        ) from None
