"""The micro-batches in a pipeline, and stages that torch's engine calls by their numbers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.parameter import is_lazy

from allstep.comm.layout import dtype_name
from allstep.errors import UsageError
from allstep.nn.chain import seeded
from allstep.nn.mixture_of_experts import serving
from allstep.nn.replicated import seed_at
from allstep.torch_classes import is_dtensor

Values = Tensor | tuple[Tensor, ...]
Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


def nothing() -> None:
    """Does nothing."""


class MicroBatches:
    """Those that are on their way through a pipeline, by number.

    Args:
        inputs: micro-batch -> the first stage's.
        loss: (what the last stage returns, micro-batch) -> its loss.
        device: where the stages are.

    Attributes:
        inputs_of: as given, as `inputs`.
        losses: [n], float64, of those that the last stage here has seen.
        begin_backward: called when a stage's backward pass of one begins.
    """

    def __init__(
        self,
        inputs: Callable[[Any], Values],
        loss: Callable[[Any, Any], Tensor],
        device: torch.device,
    ) -> None:
        self.inputs_of, self._loss, self._device = inputs, loss, device
        self._data: Sequence[Any] = ()
        self._repeated: Sequence[Values] = ()
        self._seeds: Sequence[int] = ()
        self._factors: Sequence[float] = ()
        self.losses = torch.empty(0)
        self.begin_backward: Callable[[], None] = nothing

    @contextmanager
    def begin(
        self,
        data: Sequence[Any],
        seeds: Sequence[int],
        factors: Sequence[float],
        repeated: Sequence[Values],
        begin_backward: Callable[[], None],
    ) -> Iterator[None]:
        """Around the run of these; their losses count with these factors.

        Those of which inputs are repeated follow, and have no loss. [Note: copies in step]
        """
        self._data, self._repeated = data, repeated
        self._seeds, self._factors = seeds, factors
        self.losses = torch.zeros(len(data), dtype=torch.float64, device=self._device)
        self.begin_backward = begin_backward
        try:
            yield
        finally:
            self._data = self._repeated = ()
            self.begin_backward = nothing  # an exchange's, of which there is no copy

    @contextmanager
    def looking(self, look: Callable[[Any, Any], Tensor]) -> Iterator[None]:
        """Meanwhile that is called with outputs and micro-batches in place of the loss."""
        loss, self._loss = self._loss, look
        try:
            yield
        finally:
            self._loss = loss

    def inputs(self, number: int) -> Values:
        """What the first stage takes."""
        if number < len(self._data):
            return self.inputs_of(self._data[number])
        return self._repeated[number - len(self._data)]

    def shapes(self, number: int) -> Shapes:
        """Of the first stage's inputs."""
        return shapes_of(self.inputs(number))

    def seeded(self, number: int, place: object) -> AbstractContextManager[None]:
        """A place draws the same for a micro-batch, on whichever worker it is. [Note: stages]"""
        return seeded(seed_at(self._seeds[number], place), self._device)

    def calling(self, number: int, place: object, stage: nn.Module) -> AbstractContextManager[None]:
        """Around a stage's call with a micro-batch."""
        return serving(stage) if self.is_repeated(number) else self.seeded(number, place)

    def is_repeated(self, number: int) -> bool:
        """Whether it is run for other copies of the model only. [Note: copies in step]"""
        return number >= len(self._data)

    def weighed_loss(self, output: Any, number: Tensor | int) -> Tensor:
        """What is differentiated; the loss itself is noted."""
        number = int(number)
        if self.is_repeated(number):
            outputs = output if isinstance(output, tuple) else (output,)
            return 0 * torch.stack([x.sum() for x in outputs]).sum()
        with self.seeded(number, "loss"):
            loss = self._loss(output, self._data[number])
        self.losses[number] = loss.detach()
        factor = self._factors[number]
        return loss if factor == 1 else loss * factor


class Stages(nn.Module):
    """Neighbouring stages of a worker, called by a micro-batch's number.

    Args:
        members: number among all stages -> module, in the order of their calls.
        micro_batches: that are run.
        has_fixed_shapes: whether what they return must have the same shapes in each call.
        are_sharded: whether FSDP2 has sharded them.
    """

    def __init__(
        self,
        members: dict[int, nn.Module],
        micro_batches: MicroBatches,
        *,
        has_fixed_shapes: bool,
        are_sharded: bool,
    ) -> None:
        super().__init__()
        self._numbers = list(members)
        self._members = nn.ModuleList(members.values())
        self._micro_batches = micro_batches
        self._has_fixed_shapes = has_fixed_shapes
        self._are_sharded = are_sharded
        self._shapes: Shapes | None = None

    def forward(self, *values: Tensor, number: Tensor | int) -> Any:
        """What the last of them returns; the first of all takes the micro-batch's inputs."""
        number = int(number)
        if self._are_sharded:
            torch.clear_autocast_cache()  # [Note: casts of shards]
        is_trial = self._has_fixed_shapes and self._shapes is None
        if is_trial:
            # Torch looks for shapes with numbers that nobody has set: workers that share an expert
            # would choose different tokens for it.
            values = tuple(x.masked_fill(torch.ones_like(x, dtype=torch.bool), 0) for x in values)
        is_extra = is_trial or self._micro_batches.is_repeated(number)
        found: Any = tuple(map(_received, values))
        if self._numbers[0] == 0:
            found = self._micro_batches.inputs(number)
            found = _copied(found) if is_extra else found  # which a stage may change in place
        with keeping_buffers(self._members) if is_extra else nullcontext():
            for place, stage in zip(self._numbers, self._members, strict=True):
                with self._micro_batches.calling(number, place, stage):
                    found = stage(*found) if isinstance(found, tuple) else stage(found)
        outputs = found if isinstance(found, tuple) else (found,)
        self._check(outputs)
        if self._has_fixed_shapes:  # they are sent
            outputs = tuple(output.contiguous() for output in outputs)
        for output in outputs:
            if output.requires_grad:
                output.register_hook(lambda _: self._micro_batches.begin_backward())
        return outputs if isinstance(found, tuple) else outputs[0]

    def _check(self, outputs: tuple[Any, ...]) -> None:
        """Raises UsageError if they can't be sent, or not where others were received before."""
        which = f"Stage {self._numbers[-1]}"
        others = [type(value).__name__ for value in outputs if not isinstance(value, Tensor)]
        if others:
            raise UsageError(
                f"{which} returned a {others[0]}; a stage returns a tensor or a tuple of tensors."
            )
        shapes = shapes_of(outputs)
        if self._shapes is None and self._has_fixed_shapes:
            self._shapes = shapes
        if self._shapes not in (None, shapes):
            assert self._shapes is not None
            raise UsageError(
                f"{which} returned {in_words(shapes)} for one micro-batch and"
                f" {in_words(self._shapes)} for another, whose inputs have the same shapes; what a"
                " stage of a pipeline returns must have a fixed shape."
            )


def _received(value: Tensor) -> Tensor:
    """The same numbers in the same memory, which a stage may change in place."""
    if not value.requires_grad or is_dtensor(value):
        return value
    handed_on: Tensor = _HandedOn.apply(value)  # type: ignore[no-untyped-call]
    return handed_on


class _HandedOn(Function):
    """Of a leaf, which like its views nothing may change in place while it needs a gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.data  # detach() would be a view

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _copied(values: Values) -> Values:
    return values.clone() if isinstance(values, Tensor) else tuple(x.clone() for x in values)


@contextmanager
def keeping_buffers(model: nn.Module) -> Iterator[None]:
    """Around a call that counts for nothing: it changes copies of the model's buffers.

    Not the buffers, which would be put back in place while a backward pass needs what they held.
    """
    kept = [(module, dict(module._buffers)) for module in model.modules()]
    copies: dict[int, Tensor | None] = {}
    for module, buffers in kept:
        for name, buffer in buffers.items():
            if buffer is not None and not is_lazy(buffer):
                module._buffers[name] = copies.setdefault(id(buffer), buffer.clone())
    try:
        yield
    finally:
        for module, buffers in kept:
            module._buffers.clear()
            module._buffers.update(buffers)


def shapes_of(values: Values) -> Shapes:
    """Shapes and types of some tensors.

    >>> shapes_of(torch.ones(2, 3))
    (((2, 3), torch.float32),)
    """
    tensors = (values,) if isinstance(values, Tensor) else values
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def in_words(shapes: Shapes) -> str:
    """The same for a message.

    >>> in_words((((2, 3), torch.float32),))
    '[2, 3] float32'
    """
    return " and ".join(f"{list(s)} {dtype_name(t)}" for s, t in shapes)
