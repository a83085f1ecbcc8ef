"""The base of all exchanges: hooks, the end of backward, parameters that come and go."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn

from allstep.comm import Communicator
from allstep.comm.agreement import digest
from allstep.errors import DisagreementError, UsageError
from allstep.exchange.agreement import agree
from allstep.exchange.attachable import check_sharded_before, refuse_capture
from allstep.exchange.backward import BackwardPass
from allstep.exchange.batch_norm import RunningStatistics
from allstep.exchange.carry_over import CarryOver
from allstep.exchange.divided import DividedParameters, check_divided
from allstep.exchange.exact_sums import ExactSums, OffGrid
from allstep.exchange.global_batch import BatchSum
from allstep.exchange.hooks import AccumulationHook, Removable, WeakHook, owners_of
from allstep.exchange.local_sgd import ParameterAveraging
from allstep.exchange.model_hooks import ModelHooks
from allstep.exchange.parameters import ParameterSet, Signature, signature
from allstep.exchange.part_gradients import PartGradients
from allstep.exchange.policy import ExchangePolicy, ExchangeStats
from allstep.exchange.state_sweep import StatePart, StateSweep
from allstep.exchange.stragglers import Stragglers
from allstep.exchange.weighing import divide_gradients


class Exchange(ABC):
    """Makes `p.grad` the mean over the workers at the end of each backward pass.

    `allstep.attach` makes one. The model stays unchanged, apart from hooks that `detach`
    removes. Subclasses implement in `_reduce` how gradients become their mean.

    Attributes:
        model: the attached model.
        comm: the workers.
        policy: how gradients are exchanged.
        shards: name -> shard, for parameters that are sharded along another axis of a mesh.
            [Note: shards]
        cut: name -> the workers that hold a parameter's parts, as shards or in windows.
        statistics: batch norm's running statistics.
        is_attached: True until `detach`.
        num_exchanges: number of exchanges of gradients so far.
        batch: the current global batch, and how its gradients add up.
        has_gradients: whether the last exchange left gradients for an update.
        averaging: the averaging of parameters, with local SGD; None without.
        awaits_update: whether the current item of `steps` has been run, and no update made yet.
        optimizers: the optimizers that have updated the model.
        stragglers: the workers' times.
    """

    _exact_sums: ExactSums | None = None  # what rounds gradients, with "exact"

    def __init__(self, model: nn.Module, comm: Communicator, policy: ExchangePolicy) -> None:
        self.model = model
        self.comm = comm
        self.policy = policy
        self.optimizers = WeakSet[torch.optim.Optimizer]()
        self.stragglers = Stragglers()
        self.averaging: ParameterAveraging | None = None
        self._begin()

    def _begin(self) -> None:
        """Attaches to the model, with the present workers of `comm`."""
        model, comm, policy = self.model, self.comm, self.policy
        self._parameters = ParameterSet(model)
        rounded = WeakHook(self, type(self)._round_divided) if self.is_exact else None
        scaled = WeakHook(self, type(self)._scale_divided)
        self._divided = DividedParameters(model, scaled, rounded)
        self._parts = PartGradients(
            model, self._parameters, self._divided, comm, is_exact=self.is_exact
        )
        self.shards, self.cut = self._parts.shards, self._parts.cut
        self.statistics = RunningStatistics(self._parameters, comm, is_exact=self.is_exact)
        self._sweep = StateSweep()
        self._touched: set[str] = set()  # parameters with a gradient that peers haven't seen
        self._num_suspended = 0
        self._failure: str | None = None  # what this worker tells the others at the end
        self._backward_pass = BackwardPass(self._begin_backward, self._finish_backward)
        self._hooks = ModelHooks(
            self,
            model,
            before_copy=self._warn_if_local,
            before_forward=self._before_forward,
            before_lazy_forward=self._before_lazy_forward,
            on_output_gradient=self._on_output_gradient,
            of_parameter=self._hook,
        )
        self.num_exchanges = 0
        self._num_no_sync = 0  # since the last exchange
        self.has_gradients = True
        self.batch = BatchSum(comm, policy.reduction, self.stragglers)
        self._carry_over = CarryOver(
            self._parameters, self._divided, self.batch, comm.size, self._holds_gradients
        )
        self.is_attached = True
        self.awaits_update = False
        try:
            self._take_up()
        except BaseException:
            self.detach()
            raise

    def _take_up(self) -> None:
        """Registers the hooks and makes all copies' values equal. Collective."""
        if self._is_active:
            self._activate()
        self._divided.broadcast()
        self._hooks.follow_lazy_modules(self._parameters.modules)

    def detach(self) -> None:
        """Removes all hooks, which restores the model from before `attach`. May be called again.

        Call `sync_buffers` first to end a round of local SGD, in which each worker has parameters
        of its own, and to make batch norm's running statistics those of all workers.
        """
        self._warn_if_local()
        self.is_attached = False
        self._carry_over.give_back()
        self._hooks.remove()
        self._divided.detach()
        self.statistics.detach()

    def begin_again(self, state: Mapping[str, Any]) -> None:
        """Attaches again, after the workers of `comm` have changed. Collective.

        Parameters and gradients are not sent: they are equal on all workers that continue.

        Args:
            state: what `replicated_state` returned, at the same moment on all workers.
        """
        self.detach()
        self.stragglers = Stragglers(self.stragglers.compute_cure)
        self._begin()
        self.load_state_dict(state)

    def _refuse_detached(self, verb: str) -> None:
        if not self.is_attached:
            raise UsageError(
                f"`{verb}` was called after `detach()`; call it before, or attach again."
            )

    # -- for subclasses to override ------------------------------------------------------------

    @abstractmethod
    def _reduce(self) -> Mapping[str, nn.Parameter]:
        """Replaces `p.grad` by the sum over the workers times `batch.scale`. Collective.

        Returns:
            name -> parameter for which any worker has a new gradient; others keep their `p.grad`.
        """

    @abstractmethod
    def stats(self) -> ExchangeStats:
        """Counters of what this exchange has done since `attach`."""

    @property
    def _is_active(self) -> bool:
        """Whether there is anything to do; a single worker's gradients are their own mean.

        With exact sums they are rounded, like those of several workers.
        """
        return self.comm.size > 1 or self.is_exact

    @property
    def is_exact(self) -> bool:
        """Whether sums over a global batch have the same bits on any number of workers."""
        return self._exact_sums is not None

    @property
    def _rounder(self) -> ExactSums | None:
        """The exact sums that round gradients, if they are rounded at present."""
        return None if self.batch.step is None or self._stays_local else self._exact_sums

    @property
    def _off_grid(self) -> OffGrid:
        """This worker's gradients that did not fit the grid of exact sums."""
        return {}

    @property
    def _num_completed(self) -> int:
        return 0 if self._exact_sums is None else self._exact_sums.num_completed

    @property
    def is_fully_sharded(self) -> bool:
        """Whether FSDP2 has sharded the model, which makes its passes collective."""
        return False

    @property
    def _stays_local(self) -> bool:
        """Whether the current global batch's gradients are not exchanged."""
        return False

    @property
    def _is_in_round(self) -> bool:
        """Whether the workers' parameters differ at present, in a round of local SGD."""
        return False

    def _holds_gradients(self) -> bool:
        """Whether the present `p.grad` is held out of the exchange and added to its result."""
        return False

    def begin_batch(self, num_passes: int) -> None:  # noqa: B027 (few need to know)
        """Called before a global batch or an evaluation; collective if FSDP2 has sharded the model.

        Args:
            num_passes: number of passes that this worker is about to make.
        """

    def _begin_global_batch(self, num_micro_batches: int, num_passes: int) -> None:
        """Called before a global batch's backward passes, to prepare for their gradients."""
        if self._rounder is not None:
            self._rounder.begin(self._off_grid, num_micro_batches, num_passes)

    def begin_micro_batch(self) -> None:
        """Called before the backward passes of each micro-batch of the global batch."""
        if self._exact_sums is not None:
            self._exact_sums.begin_micro_batch(self._off_grid)

    def _begin_backward(self) -> None:  # noqa: B027
        """Called before the first gradient of a pass, to prepare for them."""

    def join_others(self) -> None:  # noqa: B027
        """Called at a global batch's end; joins passes of workers with more micro-batches."""

    def _end_global_batch(self) -> None:
        """Called after a global batch's backward passes, even if one has failed."""
        self._carry_over.give_back()

    def local_gradients(self) -> dict[str, Tensor]:
        """name -> the sum of this worker's gradients so far, before they are exchanged.

        It is `p.grad`, plus what "exact" keeps apart because it does not fit the grid.
        """
        found = {name: p.grad for name, p in self.trained.items() if p.grad is not None}
        if self._exact_sums is not None:
            self._exact_sums.settle(self._off_grid)
        off_grid = self._off_grid.items()
        return found | {n: found[n] + x.total().to(found[n]) for n, x in off_grid if n in found}

    def flush(self) -> Iterator[int]:
        """Puts gradients that are still in flight in `p.grad`, one exchange after the other.

        Make an update for each. Without staleness nothing is in flight.

        Yields:
            The number of the gradient's exchange.
        """
        yield from ()

    # -- parameters, gradients and updates -----------------------------------------------------

    @property
    def trained(self) -> Mapping[str, nn.Parameter]:
        """name -> parameter whose gradient is exchanged."""
        return self._parameters.trained

    @property
    def divided(self) -> Mapping[str, nn.Parameter]:
        """name -> parameter that only this worker has. [Note: divided parameters]"""
        return self._divided.by_name

    @property
    def is_divided(self) -> bool:
        """Whether the model has modules that are divided over workers; the same on all workers."""
        return self._divided.has_modules

    @property
    def with_gradients(self) -> dict[str, nn.Parameter]:
        """name -> parameter that may have a gradient on this worker, exchanged or divided."""
        return self._parts.by_name

    def held(self, ids: set[int]) -> set[int]:
        """The ids among `ids` that belong to the model's parameters, including frozen ones."""
        return self._parameters.held(ids) | (ids & set(map(id, self.divided.values())))

    @property
    def workers_with_other_parts(self) -> list[Communicator]:
        """The workers along each axis over which the model is divided; none for a whole model."""
        return self._parts.workers

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the model's gradients so that their L2 norm is at most `max_norm`.

        As `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`, also for models that are
        divided over workers (experts, shards, stages): then it uses the norm over all parts, and is
        collective. Call it when the gradients are global, before the optimizer's step.

        Args:
            max_norm: largest norm of all gradients together.

        Returns:
            The norm before clipping.

        Example:
            >>> import allstep
            >>> model = nn.Linear(2, 1)
            >>> exchange = allstep.attach(model, allstep.Communicator.single_process())
            >>> model(torch.ones(1, 2)).sum().backward()
            >>> exchange.clip_grad_norm_(0.5)
            tensor(1.7321)
            >>> round(float(torch.cat([model.weight.grad[0], model.bias.grad]).norm()), 4)
            0.5
        """
        return self._parts.clip_norm_(max_norm)

    def unscale_(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Does what `scaler.unscale_(optimizer)` does, such that all workers skip the same steps.

        Needed before each `scaler.step(optimizer)` if experts or shards of the model are on several
        workers: a gradient that overflows on one of them concerns all. Then it is collective. It
        also works on workers that had no micro-batch yet, or have no gradient in their parts.

        Args:
            scaler: the GradScaler that the losses were scaled with.
            optimizer: the optimizer of the attached model.

        Raises:
            UsageError: if FSDP2 has sharded a model with experts on several workers.
        """
        self._parts.unscale_(scaler, optimizer)

    def note_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Called when an optimizer of the model makes a step; its options will be compared."""
        self.optimizers.add(optimizer)
        self.awaits_update = False
        self._parts.warn_if_changed(optimizer)
        if self.comm.size > 1:
            self._sweep.note_update(optimizer, self.num_exchanges)

    def has_exchanged_for(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `p.grad` was exchanged since the optimizer's last step, if it has to be."""
        if self.comm.size == 1 or self.policy.staleness or self.averaging is not None:
            return True
        return self.num_exchanges > 0 and not self._sweep.has_updated(optimizer)

    # -- global batches ------------------------------------------------------------------------

    @contextmanager
    def global_batch(
        self,
        step: int,
        samples: str = "",
        *,
        num_micro_batches: int = 1,
        num_passes: int = 1,
        sum_factor: float = 1.0,
    ) -> Iterator[None]:
        """Encloses the backward passes of one global batch, whose losses are weighed by samples.

        The weights of all workers' losses must add up to 1: `p.grad` becomes the gradients' sum.
        What it held before counts once.

        Args:
            step: the batch's number, the same on every worker.
            samples: which these are, in words; compared with the other workers'.
            num_micro_batches: of all workers together, for exact sums.
            num_passes: the most backward passes that a micro-batch takes, as a rule.
            sum_factor: by which losses with a weight are multiplied. [Note: weights]
        """
        if not self._is_active and self._parameters.has_changed():
            self._follow_model()
        elif self._is_active and self._parameters.has_joined():
            self.sync_parameters()  # before anybody watches what changes them
        self.batch.begin(step, samples, sum_factor)
        self._carry_over.carry()
        try:
            self._begin_global_batch(num_micro_batches, num_passes)
            yield
            if self.batch.weighing.has_sums and not self._is_active:
                divide_gradients(self.with_gradients.values(), self.batch.weighing.divisor())
        finally:
            self.batch.end()
            self._end_global_batch()
        self.batch.unfinished = None
        self.awaits_update = True
        self._parts.note_global()

    def left_out(self) -> AbstractContextManager[None]:
        """Encloses a global batch of other exchanges, in which this one refuses to exchange.

        It would exchange after each micro-batch, of which workers have different numbers.
        """
        return self.batch.left_out()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate in `p.grad`; the next one outside exchanges it."""
        self._num_suspended += 1
        self._num_no_sync += 1
        try:
            yield
        finally:
            self._num_suspended -= 1

    def total_weight(self) -> float:
        """The global batch's sum of weights, after its exchange; 1 if losses are means.

        On CUDA the host waits for it.
        """
        if self.batch.weighing.has_sums and not self._is_active:
            return self.batch.weighing.total()
        return self.batch.total_weight()

    def _divide_sums(self, summed: Iterable[nn.Parameter], divisor: Tensor | None) -> None:
        """Divides gradients after an exchange, including divided ones, which are sums already."""
        if divisor is not None:
            sharded = self._parameters.fully_sharded
            divide_gradients([*summed, *sharded.values(), *self.divided.values()], divisor)

    # -- the backward pass ---------------------------------------------------------------------

    def _before_forward(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self.comm.size > 1:
            refuse_capture(self.comm.device)
            if self.model.training:
                self.statistics.mark_local()
                if self.batch.step is None:  # else `steps` says so
                    self.comm.activity.enter("forward", self.num_exchanges)
            else:
                self.statistics.warn_if_local()
        self._divided.follow()
        if torch.is_grad_enabled():
            if self._parameters.has_joined():
                self.sync_parameters()
            if not self._hooks.are_newest():  # others' come before
                self._hooks.follow_gradients(self.trained)

    def _on_output_gradient(self, _: Tensor) -> None:
        if not self._num_suspended:
            self.comm.activity.enter("backward")
            self._backward_pass.enter()
            if self._divided.copies is not None and not self.trained:
                self._backward_pass.request()  # as no exchanged parameter will

    def _on_gradient(self, name: str, p: nn.Parameter) -> None:
        """Called when a backward pass has added to `p.grad`; other passes may add more."""
        self._touched.add(name)
        if not self._num_suspended:
            if self.batch.is_left_out:
                self.batch.refuse_left_out(name, self.model)
            self._backward_pass.request()

    def _scale_divided(self, name: str, gradient: Tensor | None) -> Tensor | None:
        """The scaled gradient to add to a divided parameter's; None to add it unchanged."""
        if self._rounder is not None and gradient is not None:
            with self._telling_all():
                self._rounder.check_call(name)
        scale = self.batch.scale
        return None if gradient is None or scale == 1 else gradient * scale

    def _round_divided(
        self, name: str, p: nn.Parameter, rank: int, gradient: Tensor
    ) -> Tensor | None:
        """With exact sums: the rounded gradient that replaces the one from a worker's data."""
        rounded = None
        if self._rounder is not None:
            with self._telling_all():
                rounded = self._rounder.round_call(self._off_grid, name, p, rank, gradient)
        return rounded

    def _finish_backward(self) -> None:
        name = self._parameters.used_too_early(self.divided)
        if name is not None:
            self._stop_all(
                f"Parameter `{name}` joined the model after `attach` and was used without the"
                " model's own forward, so that its values were never made equal. Call"
                " `exchange.sync_parameters()` on every worker after adding it."
            )
        self._exchange()

    def synchronize(self) -> None:
        """Exchanges what is in `p.grad` now. Collective.

        Call it on a worker whose backward pass reached no parameter, or that ran none, while others
        exchange at the end of theirs.

        Raises:
            DisagreementError: if another worker calls something else.
            UsageError: after `detach`.
        """
        self._refuse_detached("synchronize")
        if not self._is_active:
            return
        if self._parameters.has_joined():
            self.sync_parameters()
        self._carry_over.carry()
        self._touch_all()
        self._exchange()

    def _touch_all(self) -> None:
        self._touched = {name for name, p in self.trained.items() if p.grad is not None}

    def _exchange(self) -> None:
        self.comm.activity.enter("exchange")
        self._carry_over.carry()
        with torch.no_grad():
            self._carry_over.finish(self._reduce().values())
        self._carry_over.give_back()
        self._touched.clear()
        self.statistics.mark_local()
        self.statistics.warn_if_local()
        self.num_exchanges += 1
        self._num_no_sync = 0
        if self._parameters.has_frozen():
            # Not in a forward: a GAN's critic is frozen for a moment in every micro-batch, and
            # workers may have different numbers of them.
            self._follow_model()
        self.comm.activity.enter("optimizer")

    # -- what the workers agree on -------------------------------------------------------------

    def agree(self, action: str) -> None:
        """Checks that all workers do the same, before anything that sends no bucket. Collective.

        If another worker exchanges the next step's gradients instead, say, both learn it at once.

        Args:
            action: what this worker is about to do, in words.

        Raises:
            DisagreementError: on every worker, if another does something else.
        """
        if self._is_active and self.is_attached:
            self._agree(action)

    def _agree(self, action: str, described: Signature = (), described_digest: int = 0) -> None:
        """Raises DisagreementError if other workers do something else. Collective."""
        agree(self.comm, action, described, details_digest=described_digest)

    def _describe(self) -> str:
        """A description of this worker's exchange, which is compared with the others'."""
        if self.batch.step is not None:
            return f"exchange gradients {self.num_exchanges}, of {self.batch.in_words()}"
        return f"exchange gradients {self.num_exchanges}, after {self._num_no_sync} `no_sync`"

    def _next_state(self, device: torch.device) -> StatePart | None:
        """The part of the models' state that this exchange compares, with several workers."""
        if self.comm.size == 1:
            return None
        return self._sweep.next_part(self.num_exchanges, device)

    def _fail(self, message: str) -> None:
        """Records that this worker failed; the others learn it at the end of the exchange."""
        self._failure = self._failure or message

    @contextmanager
    def _telling_all(self) -> Iterator[None]:
        """Passes a UsageError inside to `_fail`, so that all workers learn it."""
        try:
            yield
        except UsageError as error:
            self._fail(str(error))

    def _stop_all(self, message: str) -> NoReturn:
        """Raises here, and on the workers that wait in an exchange. Collective."""
        try:
            self._agree(f"stop, because of this mistake: {message}")
        except DisagreementError:
            raise UsageError(message) from None
        raise UsageError(message)

    # -- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state that the next exchanges depend on, for a checkpoint. Collective.

        Gradients in flight, what was not sent yet, and the buckets' layout. State that differs
        between workers is complete on rank 0 only, which writes it.

        Raises:
            UsageError: after `detach`.
        """
        self._refuse_detached("state_dict")
        self._follow_changes()
        exact = self._exact_sums
        return {
            "policy": self.policy.state_dict(),
            "num_exchanges": self.num_exchanges,
            "averaging": None,
            **({} if exact is None else exact.gather_state(self._divided, self.comm)),
        }

    def replicated_state(self) -> dict[str, Any]:
        """The part of `state_dict` that every worker has: all that exact sums depend on.

        It is not collective, so that it is available when another worker was lost.
        `load_state_dict` accepts it, on any number of workers.
        """
        return {
            "policy": self.policy.state_dict(),
            "num_exchanges": self.num_exchanges,
            "averaging": None,
            "statistics": self.statistics.state_dict(),
            **({} if self._exact_sums is None else self._exact_sums.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state, equal on all workers, of which there may be another number now.

        Raises:
            CheckpointError: if it belongs to an exchange of other parameters or another policy.
            UsageError: after `detach`.
        """
        self._refuse_detached("load_state_dict")
        self._follow_changes()
        self.policy.check_state_dict(state.get("policy", {}))
        self.num_exchanges = state["num_exchanges"]
        if self._exact_sums is not None:
            self._exact_sums.load_state_dict(state, dict(self.model.named_parameters()))
        if "statistics" in state:
            self.statistics.load_state_dict(state["statistics"])

    def sync_buffers(self) -> None:
        """Makes batch norm's running statistics the mean over the workers. Collective.

        Other buffers get rank 0's values, as in `attach`: allstep doesn't know what changes them.
        With local SGD it first ends the round, so that all workers have the same model; call it
        after the optimizer's step.

        Raises:
            UsageError: after `detach`.
        """
        self._refuse_detached("sync_buffers")
        self._follow_changes()
        if self._is_active:
            self._agree("sum running statistics")
        self.statistics.sync()
        self._divided.broadcast(buffers_only=True)

    def _warn_if_local(self) -> None:
        """Called before the model's values are copied."""
        self.statistics.warn_if_local(in_training=True)

    # -- the model as it changes ---------------------------------------------------------------

    def sync_parameters(self) -> None:
        """Adds parameters that joined the model, with rank 0's values. Collective.

        The model's forward does this itself; call it for parameters that are used without that.

        Raises:
            DisagreementError: if the workers' models differ.
            UsageError: after `detach`.
        """
        self._refuse_detached("sync_parameters")
        newly_trained = self._follow_model()
        if self.batch.step is not None:  # their first gradients will be summed
            self._carry_over.carry(newly_trained)

    def _follow_changes(self) -> None:
        """Called outside of steps, before operations on the whole model. Collective."""
        if self._is_active and self._parameters.has_changed():
            self._follow_model()

    def _follow_model(self) -> Iterable[str]:
        """Adapts to the model's present parameters. Collective. [Note: changes of the model]

        Only this method does so, because workers must do it together. Parameters that joined are
        noticed before a forward, or in the exchange on a worker that runs no forward; those that
        were frozen or removed, at the end of an exchange; both, before a checkpoint or an
        evaluation. A single worker whose gradients are not exchanged checks before a global batch.

        Returns:
            The names of parameters that are newly trained.
        """
        check_divided(self.model, self.comm, self.policy)
        if not self.is_fully_sharded:
            check_sharded_before(self.model)
        joined, newly_trained = self._parameters.refresh()
        self._divided.refresh()
        self.statistics.refresh()
        if self._is_active:
            # Newly trained parameters may differ between workers; in a round of local SGD they do.
            new = joined if self._is_in_round else {**joined, **newly_trained}
            described = signature(self._parameters.tensors)
            self._agree("take up new parameters", described, digest((described, len(new))))
            if new:
                self.comm.broadcast(tuple(x.detach() for x in new.values()), root=0)
            self._hook_parameters()
            self._touch_all()  # names may have moved; exchanging a gradient twice is harmless
        self._hooks.follow_lazy_modules(self._parameters.modules)
        return newly_trained

    def _before_lazy_forward(self, module: nn.Module, args: Any) -> None:
        """Adds a lazy module's parameters, which it gets in its first forward."""
        self._before_forward()
        self.statistics.before_forward(module, args)

    def _activate(self) -> None:
        self._hooks.follow_forward()
        self._hook_parameters()

    def _hook_parameters(self) -> None:
        """Registers hooks of newly trained parameters, and removes those of others."""
        self._hooks.follow_gradients(self.trained)
        self._signature = signature(dict(self.trained))
        self._digest = digest(self._signature)
        tensors = self._parameters.tensors.items()
        self._sweep.set_tensors({n: t for n, t in tensors if isinstance(t, nn.Parameter)})

    def _hook(self, name: str, p: nn.Parameter) -> list[Removable]:
        on_gradient = WeakHook(self, type(self)._on_gradient, name)
        handles: list[Removable] = [p.register_post_accumulate_grad_hook(on_gradient)]  # type: ignore[no-untyped-call]
        if self.policy.reduction == "sum" or self.policy.staleness:  # outside of batches, too
            carry = WeakHook(self._carry_over, CarryOver.carry_one, name)
            handles.append(AccumulationHook(p, carry))
        return handles


def exchanges_of(model: nn.Module) -> Iterator[tuple[str, Exchange]]:
    """The exchanges that the model or a module in it is attached to, with that module's name."""
    for name, module in model.named_modules():
        for exchange in owners_of(module._state_dict_pre_hooks, Exchange):  # type: ignore[type-abstract]
            yield name, exchange
