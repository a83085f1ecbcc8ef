"""Operations on all gradients of a model, which may be divided over workers."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from allstep.comm import (
    Communicator,
    Shard,
    prefixes_of,
    shards_of,
    stages_of,
    workers_of_parts,
)
from allstep.comm.reproducible import carried, digits_of, digits_of_squares, sum_of_digits
from allstep.errors import UsageError
from allstep.exchange.divided import DividedParameters
from allstep.exchange.parameters import ParameterSet
from allstep.torch_classes import is_dtensor, is_first_copy, local_part


class PartGradients:
    """The gradients of this worker's part of a model, for norms and checks over all parts.

    Args:
        model: the attached model.
        parameters: its parameters that are exchanged.
        divided: its divided parameters on this worker.
        comm: the workers that the model is attached to.
        is_exact: whether a norm must not depend on how the model is divided.

    Attributes:
        shards: name -> shard, for parameters that are sharded along another axis.
        cut: name -> the workers that hold a parameter's parts, as shards or in windows.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: ParameterSet,
        divided: DividedParameters,
        comm: Communicator,
        *,
        is_exact: bool = False,
    ) -> None:
        self._parameters = parameters
        self._divided = divided
        self._comm = comm
        self._is_exact = is_exact
        self.shards: Mapping[str, Shard] = shards_of(model)
        self.cut: Mapping[str, Communicator] = workers_of_parts(model)
        for name, workers in self.cut.items():  # optimizers add up the parts' norms over them
            model.get_parameter(name).shard_group = workers  # type: ignore[attr-defined]
        self._along_cuts = list(dict.fromkeys(self.cut.values()))
        stages = stages_of(model)
        self._along_stages = list({modules.comm: None for modules in stages.values()})
        self._model, self._in_stages = model, prefixes_of(stages)
        self._versions: list[float] | None = None  # of the global gradients
        self._has_told = False

    def clip_norm_(self, max_norm: float) -> Tensor:
        """Scales all gradients by their norm, the same on all workers of a copy. Collective.

        norm = sqrt(sum over whole w of |g_w|^2 + sum over workers r and their parts p of |g_pr|^2)

        The stages of a pipeline or a chain are parts along their axis.
        """
        trained = list(self.by_name.values())
        own, exchanged = self._divided.by_name, self._parameters.trained
        kinds = [x for x in (exchanged, self._parameters.fully_sharded) if x] or [exchanged]
        if len(kinds) == 1 and not (self.workers or self._is_exact):
            return _whole(nn.utils.clip_grad_norm_(trained, max_norm))
        beside = self._beside_stages()
        total = torch.stack([self._square_of_whole(some, beside) for some in kinds]).sum(0)
        if self._divided.has_modules:
            square, copies = self._square_of_whole(own), self._divided.copies
            if copies is not None and copies.rank > 0:
                square.zero_()  # the first copy's counts
            total = total + self._comm.all_reduce(square)
        total = self._over_stages(total, beside, {n: p for some in kinds for n, p in some.items()})
        if self._is_exact:
            total = sum_of_digits(carried(total))
        dtype = torch.float32
        for p in trained:
            if p.grad is not None:
                dtype = torch.promote_types(dtype, p.grad.dtype.to_real())
        norm = total.sqrt().to(dtype)
        for some in (*kinds, own):  # DTensors and others don't mix
            nn.utils.clip_grads_with_norm_(some.values(), max_norm, norm)
        self.note_global()
        return norm

    def unscale_(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Does what `scaler.unscale_(optimizer)` does, alike on all workers of a copy. Collective.

        Raises:
            UsageError: if FSDP2 has sharded the model and it has experts.
        """
        if not scaler.is_enabled():
            return
        has_experts = self._divided.has_modules or bool(self._parameters.trained)
        if self._parameters.fully_sharded and has_experts:
            raise UsageError(
                "`scaler` is enabled, and torch's takes no shards of FSDP2 together with experts:"
                " take `enabled=False`, and bfloat16 in place of float16."
            )
        begin_scale(scaler, self._comm.device)
        scaler.unscale_(optimizer)
        flags: dict[Any, Tensor] = scaler._found_inf_per_device(optimizer)
        found = torch.zeros((), dtype=torch.float32, device=self._comm.device)
        for flag in flags.values():
            found = found + flag.to(found.device)
        for comm in self.workers:
            found = comm.all_reduce(found, "max")
        for flag in flags.values():
            flag.copy_(found)
        flags.setdefault(found.device, found)  # of a worker whose parts have no gradient
        self.note_global()

    def note_global(self) -> None:
        """Records that the gradients are complete."""
        self._versions = self._seen() if self.workers else None

    def warn_if_changed(self, optimizer: torch.optim.Optimizer) -> None:
        """Warns once if gradients were changed since, as by clipping only this worker's part."""
        before, self._versions = self._versions, None
        if before is None or self._has_told or before == self._seen():
            return
        self._has_told = True
        logging.getLogger("allstep").warning(
            "the gradients were changed before the %s's step, and this worker has a part of the"
            " model: torch's clip_grad_norm_ and GradScaler look at no other. Use"
            " `exchange.clip_grad_norm_(max_norm)` and `exchange.unscale_(scaler, optimizer)`; what"
            " works element by element is as good as ever",
            type(optimizer).__name__,
        )

    @property
    def by_name(self) -> dict[str, nn.Parameter]:
        """name -> parameter that may have a gradient on this worker, exchanged or divided."""
        parameters = self._parameters
        return {**parameters.trained, **parameters.fully_sharded, **self._divided.by_name}

    @property
    def workers(self) -> list[Communicator]:
        """The workers along each axis over which this copy of the model is divided.

        Collectives along each of them, in this order, reach all: stages come last, because some may
        have no sharded layers.
        """
        over_data = [self._comm] if self._divided.has_modules else []
        return [*self._along_cuts, *over_data, *self._along_stages]

    def _seen(self) -> list[float]:
        """Numbers that change when gradients do: versions, and first elements of DTensors."""
        found = [x for x in (p.grad for p in self.by_name.values()) if x is not None]
        # Foreach operations on DTensors, as torch's clipping is, leave `_version` as it was.
        first = [local_part(x).detach().flatten()[:1] for x in found if is_dtensor(x)]
        numbers: list[float] = torch.cat(first).nan_to_num().tolist() if first else []
        return [*numbers, *(x._version for x in found)]

    def _beside_stages(self) -> set[str]:
        """The names of parameters outside of stages, frozen or not, if there are stages."""
        names = [name for name, _ in self._model.named_parameters()] if self._along_stages else []
        return {name for name in names if not name.startswith(self._in_stages)}

    def _over_stages(
        self, total: Tensor, beside: Collection[str], parameters: Mapping[str, nn.Parameter]
    ) -> Tensor:
        """Adds the squares of others' stages, and of parameters outside of stages. Collective.

        The latter count once: workers that use them have equal gradients, others none or zeros.
        """
        if not beside:  # and no need for the host to wait
            for comm in self._along_stages:
                total = comm.all_reduce(total)
            return total
        squares = {
            name: self._square_of_whole({name: p}).cpu()
            for name, p in parameters.items()
            if name in beside
        }
        for comm in self._along_stages:
            found = comm.all_gather_object((total.cpu(), squares))
            total = torch.stack([of_stages for of_stages, _ in found]).sum(0)
            squares = {}
            for name, square in chain(*(of_rank.items() for _, of_rank in found)):
                if name not in squares or not squares[name].any():
                    squares[name] = square
        return sum(squares.values(), total).to(self._comm.device)

    def _square_of_whole(
        self, parameters: Mapping[str, nn.Parameter], left_out: Collection[str] = ()
    ) -> Tensor:
        """The squared norm of parameters, including other workers' parts of them. Collective."""
        if left_out:
            parameters = {name: p for name, p in parameters.items() if name not in left_out}
        total = self._square(p for name, p in parameters.items() if name not in self.cut)
        for comm in self._along_cuts:
            parts = (p for name, p in parameters.items() if self.cut.get(name) is comm)
            total = total + comm.all_reduce(self._square(parts))
        return total

    def _square(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The squared norm in float64, whatever gradients this worker has; digits if exact."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self._is_exact and gradients and is_dtensor(gradients[0]):
            return self._comm.all_reduce(self._digits_of_shards(gradients))
        if self._is_exact:
            return digits_of(self._squares(gradients)).sum(0)
        if gradients and is_dtensor(gradients[0]):
            norm = _whole(get_total_norm(gradients))
            return norm.to(self._comm.device, torch.float64).square()
        return self._squares(gradients).sum()

    def _squares(self, gradients: Sequence[Tensor]) -> Tensor:
        """Each gradient's squared norm, which is real, in float64."""
        if not gradients:
            return torch.zeros(1, dtype=torch.float64, device=self._comm.device)
        norms = [norm.to(self._comm.device) for norm in torch._foreach_norm(list(gradients))]
        return torch.stack(norms).to(torch.float64).square()

    def _digits_of_shards(self, gradients: Sequence[Tensor]) -> Tensor:
        """The digits of this worker's shards, unless another worker counts them."""
        own = [x for x in gradients if is_dtensor(x) and is_first_copy(x)]
        digits = [digits_of_squares(local_part(x)) for x in own]
        return torch.stack(digits).sum(0) if digits else digits_of(torch.zeros(()))


def begin_scale(scaler: torch.amp.GradScaler, device: torch.device) -> None:
    """Initialises the scale, as a first loss does, for a worker that had no micro-batch yet."""
    scaler.scale(torch.zeros((), device=device))


def _whole(norm: Tensor) -> Tensor:
    """The whole norm of DTensors' gradients, summed over FSDP2's workers. Collective for these."""
    return norm.full_tensor() if is_dtensor(norm) else norm
