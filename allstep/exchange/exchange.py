"""What all exchanges share: hooks, the end of backward, parameters that come and go."""

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

    `allstep.attach` makes one. The model stays as it is, apart from hooks that `detach`
    removes. A kind of exchange says in `_reduce` how gradients become their mean.

    Attributes:
        model: the attached model.
        comm: the workers.
        policy: how gradients are exchanged.
        shards: name -> shard, of the parameters of which workers along another axis of a mesh
            have other parts. [Note: shards]
        cut: name -> workers that have the parts of a parameter, as shards or in windows.
        statistics: batch norm's running statistics.
        is_attached: until `detach`.
        num_exchanges: exchanges of gradients so far.
        batch: the global batch that is being run, and how gradients add up.
        has_gradients: whether the last exchange left a gradient to make an update with.
        averaging: of the parameters, with local SGD; None without.
        awaits_update: whether a global batch has been run whose turn in `steps` is not over, and
            no update was made yet.
        optimizers: that have updated the model.
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
        """Takes up the model, with the workers that `comm` is of now."""
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
        """Hooks the model and gives all copies the same values. Collective."""
        if self._is_active:
            self._activate()
        self._divided.broadcast()
        self._hooks.follow_lazy_modules(self._parameters.modules)

    def detach(self) -> None:
        """Removes all hooks; the model is as it was before `attach`. May be called again.

        In a round of local SGD each worker keeps its own parameters; `sync_buffers` ends it. Call
        it first, too, where batch norm's running statistics are to be all workers'.
        """
        self._warn_if_local()
        self.is_attached = False
        self._carry_over.give_back()
        self._hooks.remove()
        self._divided.detach()
        self.statistics.detach()

    def begin_again(self, state: Mapping[str, Any]) -> None:
        """Takes up the workers that `comm` is of now, whoever they were before. Collective.

        Parameters and gradients stay as they are: those who go on have the same.

        Args:
            state: from `replicated_state`, of the same moment on all workers.
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

    # -- what a kind of exchange decides -------------------------------------------------------

    @abstractmethod
    def _reduce(self) -> Mapping[str, nn.Parameter]:
        """Replaces `p.grad` by the sum of all times `batch.scale`. Collective.

        Returns:
            name -> parameter that any worker has touched; others keep `p.grad` as it is.
        """

    @abstractmethod
    def stats(self) -> ExchangeStats:
        """What this exchange has done since `attach`."""

    @property
    def _is_active(self) -> bool:
        """Whether there is anything to do; gradients of a lone worker are their own mean.

        With exact sums they are rounded, as several workers' are.
        """
        return self.comm.size > 1 or self.is_exact

    @property
    def is_exact(self) -> bool:
        """Whether a global batch's sums have the same bits on any number of workers."""
        return self._exact_sums is not None

    @property
    def _rounder(self) -> ExactSums | None:
        """What rounds them, where they are rounded now."""
        return None if self.batch.step is None or self._stays_local else self._exact_sums

    @property
    def _off_grid(self) -> OffGrid:
        """This worker's gradients that did not fit, with exact sums."""
        return {}

    @property
    def _num_completed(self) -> int:
        return 0 if self._exact_sums is None else self._exact_sums.num_completed

    @property
    def is_fully_sharded(self) -> bool:
        """Whether FSDP2 has sharded the model, so that its passes are collective."""
        return False

    @property
    def _stays_local(self) -> bool:
        """Whether the present global batch's gradients stay with their worker."""
        return False

    @property
    def _is_in_round(self) -> bool:
        """Whether each worker has parameters of its own by now, with local SGD."""
        return False

    def _holds_gradients(self) -> bool:
        """Whether what `p.grad` has held so far stays out of the exchange, to be added after it."""
        return False

    def begin_batch(self, num_passes: int) -> None:  # noqa: B027 (few need to know)
        """A global batch or an evaluation begins; collective if FSDP2 has sharded the model.

        Args:
            num_passes: that this worker is about to make.
        """

    def _begin_global_batch(self, num_micro_batches: int, num_passes: int) -> None:
        """Before its backward passes; a kind of exchange may prepare for their gradients."""
        if self._rounder is not None:
            self._rounder.begin(self._off_grid, num_micro_batches, num_passes)

    def begin_micro_batch(self) -> None:
        """The backward passes that follow are of another micro-batch of the global batch."""
        if self._exact_sums is not None:
            self._exact_sums.begin_micro_batch(self._off_grid)

    def _begin_backward(self) -> None:  # noqa: B027
        """Before the first gradient of a pass; a kind of exchange may prepare for them."""

    def join_others(self) -> None:  # noqa: B027
        """At its end: takes part in the passes of workers with more micro-batches, if need be."""

    def _end_global_batch(self) -> None:
        """After them, also where they have failed."""
        self._carry_over.give_back()

    def local_gradients(self) -> dict[str, Tensor]:
        """name -> the sum of this worker's gradients so far, before they are exchanged.

        It is `p.grad`, but for "exact", which keeps apart what doesn't fit its grid.
        """
        found = {name: p.grad for name, p in self.trained.items() if p.grad is not None}
        if self._exact_sums is not None:
            self._exact_sums.settle(self._off_grid)
        off_grid = self._off_grid.items()
        return found | {n: found[n] + x.total().to(found[n]) for n, x in off_grid if n in found}

    def flush(self) -> Iterator[int]:
        """Leaves what is still in flight in `p.grad`, one gradient after the other.

        Make an update for each. Nothing is in flight without staleness.

        Yields:
            The number of the exchange that the gradient is of.
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
        """Whether the model has modules that are divided over several workers, the same on all."""
        return self._divided.has_modules

    @property
    def with_gradients(self) -> dict[str, nn.Parameter]:
        """name -> parameter that may have a gradient here, exchanged or this worker's only."""
        return self._parts.by_name

    def held(self, ids: set[int]) -> set[int]:
        """Those `id`s that are of a parameter of the model, which may be frozen."""
        return self._parameters.held(ids) | (ids & set(map(id, self.divided.values())))

    @property
    def workers_with_other_parts(self) -> list[Communicator]:
        """Those whose gradients this worker does not see, along each axis over which parts lie."""
        return self._parts.workers

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the model's gradients so that their L2 norm is at most `max_norm`.

        `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)` for models of which workers
        have parts, as experts, shards or stages: by the norm over all. Then it is collective. Call
        it where the gradients are global, before the optimizer's step.

        Args:
            max_norm: of all gradients together.

        Returns:
            The norm before.

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
        """`scaler.unscale_(optimizer)`, after which all workers skip the same steps.

        Needed before each `scaler.step(optimizer)` where workers have experts or shards of the
        model: a gradient that overflows on one of them is every worker's. Then it is collective.
        It also serves workers that had no micro-batch yet, or have no gradient in their parts.

        Args:
            scaler: that the losses were scaled with.
            optimizer: of the attached model.

        Raises:
            UsageError: if FSDP2 has sharded a model with experts on several workers.
        """
        self._parts.unscale_(scaler, optimizer)

    def note_update(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of the model's parameters makes a step, whose rates will be compared."""
        self.optimizers.add(optimizer)
        self.awaits_update = False
        self._parts.warn_if_changed(optimizer)
        if self.comm.size > 1:
            self._sweep.note_update(optimizer, self.num_exchanges)

    def has_exchanged_for(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `p.grad` was exchanged since the optimizer's last step, where it ought to be."""
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
        """Around the backward passes of one global batch, whose losses are weighed by samples.

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
        self.awaits_update = True
        self._parts.note_global()

    def left_out(self) -> AbstractContextManager[None]:
        """Around a global batch of other exchanges: an exchange of this one is refused.

        It would come after each micro-batch, and workers have different numbers of them.
        """
        return self.batch.left_out()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate in `p.grad`; the next one outside sends all."""
        self._num_suspended += 1
        self._num_no_sync += 1
        try:
            yield
        finally:
            self._num_suspended -= 1

    def total_weight(self) -> float:
        """All workers' weights of the global batch, after its exchange; 1 where losses are means.

        On CUDA the host waits for it.
        """
        if self.batch.weighing.has_sums and not self._is_active:
            return self.batch.weighing.total()
        return self.batch.total_weight()

    def _divide_sums(self, summed: Iterable[nn.Parameter], divisor: Tensor | None) -> None:
        """After an exchange; gradients that nobody exchanges are sums already."""
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
        """A backward pass has added to `p.grad`; more may follow in others."""
        self._touched.add(name)
        if not self._num_suspended:
            if self.batch.is_left_out:
                self.batch.refuse_left_out(name, self.model)
            self._backward_pass.request()

    def _scale_divided(self, name: str, gradient: Tensor | None) -> Tensor | None:
        """What is added to `p.grad`, of all workers' losses; None for the gradient as it is."""
        if self._rounder is not None and gradient is not None:
            with self._telling_all():
                self._rounder.check_call(name)
        scale = self.batch.scale
        return None if gradient is None or scale == 1 else gradient * scale

    def _round_divided(
        self, name: str, p: nn.Parameter, rank: int, gradient: Tensor
    ) -> Tensor | None:
        """What takes the place of the gradient of a worker's data, with exact sums."""
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

        For a worker whose backward pass reached no parameter, or that ran none, while others
        exchange at the end of theirs.

        Raises:
            DisagreementError: if another worker came for something else.
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
        """Makes sure that all workers came to do the same, before what sends no bucket. Collective.

        A worker that came for the next step's gradients, say, and this one learn it at once.

        Args:
            action: what this worker wants to do, in words.

        Raises:
            DisagreementError: on every worker, if another came for something else.
        """
        if self._is_active and self.is_attached:
            self._agree(action)

    def _agree(self, action: str, described: Signature = (), described_digest: int = 0) -> None:
        """Raises DisagreementError if other workers came for something else. Collective."""
        agree(self.comm, action, described, details_digest=described_digest)

    def _describe(self) -> str:
        """What this worker believes it exchanges; compared with the others'."""
        if self.batch.step is not None:
            return f"exchange gradients {self.num_exchanges}, of {self.batch.in_words()}"
        return f"exchange gradients {self.num_exchanges}, after {self._num_no_sync} `no_sync`"

    def _next_state(self, device: torch.device) -> StatePart | None:
        """What the exchange that starts compares of the workers' models, if there are several."""
        if self.comm.size == 1:
            return None
        return self._sweep.next_part(self.num_exchanges, device)

    def _fail(self, message: str) -> None:
        """This worker can't take part; the others learn it at the end of the exchange."""
        self._failure = self._failure or message

    @contextmanager
    def _telling_all(self) -> Iterator[None]:
        """Around what may be wrong with this worker's gradients, by `_fail`."""
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
        """What the next exchanges depend on, to go in a checkpoint. Collective.

        Gradients in flight, what was not sent yet, and how buckets are made. What differs
        between workers is whole on rank 0 alone, which writes it.

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
        """What each worker has of `state_dict` by itself: all that the sums of `exact` depend on.

        Not collective, so that it can be had when another worker was lost. `load_state_dict` takes
        it, on any number of workers.
        """
        return {
            "policy": self.policy.state_dict(),
            "num_exchanges": self.num_exchanges,
            "averaging": None,
            "statistics": self.statistics.state_dict(),
            **({} if self._exact_sums is None else self._exact_sums.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a checkpoint, the same on all workers, whose number may be another.

        Raises:
            CheckpointError: if it is of an exchange of other parameters, or of another policy.
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

        Other buffers get rank 0's values, as at `attach`: what changes them is not known.
        With local SGD it ends the round first, so that all workers have one model; call it
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
        """Before values are copied."""
        self.statistics.warn_if_local(in_training=True)

    # -- the model as it changes ---------------------------------------------------------------

    def sync_parameters(self) -> None:
        """Takes up parameters that joined the model, with rank 0's values. Collective.

        The model's forward does it by itself; it is for parameters that are used without it.

        Raises:
            DisagreementError: if the workers' models differ.
            UsageError: after `detach`.
        """
        self._refuse_detached("sync_parameters")
        newly_trained = self._follow_model()
        if self.batch.step is not None:  # their first gradients are to be summed
            self._carry_over.carry(newly_trained)

    def _follow_changes(self) -> None:
        """Before what is of the whole model, outside of a step. Collective."""
        if self._is_active and self._parameters.has_changed():
            self._follow_model()

    def _follow_model(self) -> Iterable[str]:
        """Takes the model as it is now. Collective. [Note: changes of the model]

        Nothing else does, for workers must do it together. What joined is noticed before a forward,
        or by a worker without one when it comes to the exchange; what was frozen or left, at the
        end of an exchange; both, before a checkpoint or an evaluation. A lone worker whose
        gradients nobody takes looks before a global batch.

        Returns:
            The names of parameters that are trained from now on.
        """
        check_divided(self.model, self.comm, self.policy)
        if not self.is_fully_sharded:
            check_sharded_before(self.model)
        joined, newly_trained = self._parameters.refresh()
        self._divided.refresh()
        self.statistics.refresh()
        if self._is_active:
            # What starts to be trained may have been changed, and in a round of local SGD it has.
            new = joined if self._is_in_round else {**joined, **newly_trained}
            described = signature(self._parameters.tensors)
            self._agree("take up new parameters", described, digest((described, len(new))))
            if new:
                self.comm.broadcast(tuple(x.detach() for x in new.values()), root=0)
            self._hook_parameters()
            self._touch_all()  # names may have moved; to exchange a gradient again changes nothing
        self._hooks.follow_lazy_modules(self._parameters.modules)
        return newly_trained

    def _before_lazy_forward(self, module: nn.Module, args: Any) -> None:
        """A lazy module gets its parameters in its first forward: takes them up right there."""
        self._before_forward()
        self.statistics.before_forward(module, args)

    def _activate(self) -> None:
        self._hooks.follow_forward()
        self._hook_parameters()

    def _hook_parameters(self) -> None:
        """Hooks the trained parameters that aren't yet, and unhooks those that left."""
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
    """Those that the model, or a part of it, is attached with, and the name of that part."""
    for name, module in model.named_modules():
        for exchange in owners_of(module._state_dict_pre_hooks, Exchange):  # type: ignore[type-abstract]
            yield name, exchange
