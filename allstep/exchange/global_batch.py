"""The current global batch, and the factors with which its gradients are summed."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor, nn

from allstep.comm import Communicator
from allstep.errors import UsageError
from allstep.exchange.piggyback import (
    note_of,
    notes_of,
    refuse_mixed_weights,
    times_in,
    total_weight,
)
from allstep.exchange.stragglers import Stragglers
from allstep.exchange.weighing import Weighing, divide_gradients


class BatchSum:
    """The factor of gradients before their sum over the workers, and the divisor of the sum.

    grad = sum_r scale * grad_r / divisor

    The divisor is 1 unless losses are sums themselves. [Note: weights]

    Args:
        comm: the workers.
        reduction: "mean" or "sum", of gradients outside of a global batch.
        stragglers: receives the workers' times, which are sent with their weights.

    Attributes:
        step: number of the current global batch; None outside of one.
        unfinished: number of a global batch that was left before its end, while `steps` waits for
            the update; else None.
        weighing: the weights of this worker's losses.
        is_left_out: whether a global batch of other models is running.
    """

    def __init__(self, comm: Communicator, reduction: str, stragglers: Stragglers) -> None:
        self._comm, self._reduction, self._stragglers = comm, reduction, stragglers
        self._samples = ""
        self._total_weight: Tensor | None = None  # of the last exchange's losses
        self.step: int | None = None
        self.unfinished: int | None = None
        self.weighing = Weighing.of_means()
        self.is_left_out = False

    def begin(self, step: int, samples: str, sum_factor: float) -> None:
        """Begins a global batch; see `Exchange.global_batch`."""
        self.step, self.unfinished, self._samples = step, step, samples
        self.weighing, self._total_weight = Weighing(sum_factor), None

    def end(self) -> None:
        """Ends the global batch, also after an exception."""
        self.step, self.weighing = None, Weighing.of_means()

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Encloses a global batch of other models; see `Exchange.left_out`."""
        self.is_left_out = True
        try:
            yield
        finally:
            self.is_left_out = False

    def refuse_left_out(self, name: str, model: nn.Module) -> NoReturn:
        """Raises because a parameter gets a gradient in another models' global batch."""
        raise UsageError(
            f"`{name}` of the {type(model).__name__} got a gradient in the loop over a global"
            " batch, and `steps` was not given the exchange of this model, which is attached, too:"
            " its mean would be taken after each micro-batch. Give `steps(loader, exchange, other)`"
            " all exchanges, or put the models in one `torch.nn.ModuleList` and attach that."
        )

    def in_words(self) -> str:
        """The global batch in words, for a comparison of the workers."""
        return f"global batch {self.step}" + (f" ({self._samples})" if self._samples else "")

    @property
    def scale(self) -> float:
        """The only factor between a gradient and its share of the sum.

        1/size for a mean; 1 for a sum, and for a global batch, whose losses are weighed already.
        """
        is_weighed = self.step is not None or self._reduction == "sum"
        return 1.0 if is_weighed else 1 / self._comm.size

    def total_weight(self) -> float:
        """Sum of all workers' weights, after the exchange; 1 if losses are means."""
        return 1.0 if self._total_weight is None else float(self._total_weight)

    def divisor(self, total: Tensor | None, weighing: Weighing) -> Tensor | None:
        """The divisor of an exchange's sums, for losses with these weights; None for means."""
        self._total_weight = total
        return None if total is None else total * weighing.factor

    def note(self) -> bytes:
        """This worker's weights and times as a message of fixed size, if no bucket carries them."""
        return note_of(self.weighing, self._stragglers.own_times)

    def divisor_told(self, told: Sequence[bytes]) -> Tensor | None:
        """The divisor of the global batch's sums; None for means.

        Args:
            told: each worker's `note`.

        Raises:
            UsageError: on all workers, if some gave weighted sums and others means.
        """
        if self.step is None:
            return None
        notes = notes_of(told)
        refuse_mixed_weights(notes)
        self._stragglers.note(times_in(notes), self._comm)
        return self.divisor(total_weight(notes, self.weighing), self.weighing)

    def take_own_for_all(self, parameters: Iterable[nn.Parameter], num_workers: int) -> None:
        """Makes `p.grad` the sum over `num_workers` workers with this worker's gradient."""
        if self.weighing.has_sums:
            total = self.weighing.total() * num_workers
            self._total_weight = torch.tensor(total, dtype=torch.float64)
            if total:
                divide_gradients(parameters, self.weighing.divisor())
        elif (factor := self.scale * num_workers) != 1:
            for p in parameters:
                if p.grad is not None:
                    p.grad.mul_(factor)
