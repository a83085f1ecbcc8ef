"""Models that FSDP2 shards over the workers that they are attached to."""

from collections.abc import Mapping
from contextlib import nullcontext

from torch import Tensor, nn

from allstep.comm import Communicator
from allstep.comm.agreement import Details
from allstep.errors import UsageError
from allstep.exchange.agreement import CURE, agree
from allstep.exchange.exact_shards import ExactShards
from allstep.exchange.exact_sums import ExactSums, OffGrid
from allstep.exchange.fully_sharded_passes import CollectivePasses
from allstep.exchange.hooks import AccumulationHook, Removable, WeakHook
from allstep.exchange.plain import PlainExchange


class FullyShardedExchange(PlainExchange):
    """Leaves the gradients to FSDP2. [Note: fully sharded models]"""

    def _begin(self) -> None:
        is_exact = self.policy.wire_format.name == "exact"
        self._exact = ExactShards(self.comm) if is_exact else None
        self._exact_sums = None if self._exact is None else self._exact.sums
        self._passes = CollectivePasses(self.model, self.comm, self._exact)
        self._cure = f"{CURE} {self._passes.parts.cure}"
        super()._begin()
        self._set_scale()
        if self._exact is not None:
            for p in self._parameters.fully_sharded.values():
                p.exact_squares = self._exact  # type: ignore[attr-defined]

    @property
    def _off_grid(self) -> OffGrid:
        return {} if self._exact is None else self._exact.off_grid

    @property
    def is_fully_sharded(self) -> bool:
        return True

    @property
    def workers_with_other_parts(self) -> list[Communicator]:
        others = super().workers_with_other_parts
        return others if self.comm in others or self.comm.size == 1 else [*others, self.comm]

    def local_gradients(self) -> dict[str, Tensor]:
        raise UsageError(
            "`local_gradients` was asked of a model that FSDP2 has sharded, which sums the workers'"
            " gradients before anybody sees one worker's."
        )

    def begin_batch(self, num_passes: int) -> None:
        self._passes.begin_batch(num_passes)

    def begin_micro_batch(self) -> None:
        self._passes.begin_micro_batch()

    def join_others(self) -> None:
        is_training, parts = self.batch.step is not None, self._passes.parts
        with self.statistics.micro_batch(0.0) if is_training else nullcontext(), self.no_sync():
            self._passes.join_others()
        if not is_training:
            agree(self.comm, "run a model that FSDP2 has sharded", parts.calls, cure=parts.cure)
        if not (is_training and self._is_active):  # else the exchange compares, and ends it
            parts.end({name for name, has in parts.has_gradient().items() if has})

    def detach(self) -> None:
        super().detach()
        self._passes.detach()
        for p in self._parameters.fully_sharded.values():
            vars(p).pop("exact_squares", None)

    def _begin_global_batch(self, num_micro_batches: int, num_passes: int) -> None:
        self._set_scale()
        if self._exact is not None:
            shards = self._parameters.fully_sharded
            parameters = {**shards, **self._not_sharded}
            ExactSums.refuse_complex({n: p for n, p in parameters.items() if p.requires_grad})
            self._carry_over.hold(parameters)
            self._exact.begin(shards, self.num_exchanges, num_micro_batches, num_passes)

    def _end_global_batch(self) -> None:
        self._set_scale()
        if self._exact is not None:
            self._exact.end()
        super()._end_global_batch()

    def _reduce(self) -> Mapping[str, nn.Parameter]:
        if (failure := self._failure) is not None:
            self._failure = None
            self._stop_all(failure)
        return super()._reduce()

    @property
    def _calls(self) -> Details:
        return self._passes.parts.calls

    def _has_new_gradient(self) -> dict[str, bool]:
        return {**super()._has_new_gradient(), **self._passes.parts.has_gradient()}

    def _agree_on_gradients(self) -> tuple[set[str], Tensor | None]:
        with_gradient, divisor = super()._agree_on_gradients()
        self._passes.parts.end(with_gradient)
        return with_gradient, divisor

    @property
    def _not_sharded(self) -> dict[str, nn.Parameter]:
        """Experts' parameters, of which a lone worker has all."""
        return {**self._parameters.trained, **self.divided}

    def _hook(self, name: str, p: nn.Parameter) -> list[Removable]:
        handles = super()._hook(name, p)
        if self._exact is not None:
            rounded = WeakHook(self._exact, ExactShards.round, name, p)
            handles.append(AccumulationHook(p, rounded))
        return handles

    def _sum_others(self) -> None:
        if self._exact is None or self.batch.step is None:
            super()._sum_others()
        else:
            sums, number = self._exact.sums, self.num_exchanges
            self._exact.complete(number)
            self._divided.sum_copies(self._off_grid)
            sums.follow(self._off_grid, (), {}, self._not_sharded, number)

    def _set_scale(self) -> None:
        self._passes.set_scale(self.batch.scale)
