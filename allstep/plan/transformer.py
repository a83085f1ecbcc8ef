"""The blocks of a transformer, and what tensor parallelism makes of a step of them.

[Note: divided blocks] A block has query, key, value and output matrices of w x w for w features,
and an mlp of w x 4w x w. Query, key, value and the mlp's first matrix are divided by columns, the
other two by rows, so that all is whole again after each half of a block: there, workers of a copy
wait for the sum of their activations, and in the backward pass for that of their gradients. Of
n parameters of which `depth` (12 w^2 + 7 w) are divided over t workers, each has

    n - (1 - 1/t) depth (12 w^2 + 7 w)

and of a step's compute, with a share of d that is divided,

    d/t + 1 - d

where d is measured, or follows from the multiplications of a token,

    d = depth (12 w^2 + 2 s w) / (depth (12 w^2 + 2 s w) + r)

where s is the sequence's length, and r are the parameters outside of the blocks, taken as
embeddings that make the logits, too. These stay whole, and so does all that has no matrices, which
this count leaves out: in small models on CPUs it takes a quarter of the time.

Source: Shoeybi et al., Megatron-LM, 2019, arXiv:1909.08053, section 3; it divides embeddings, too.
"""

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from allstep.errors import UsageError, check_integer, check_multiple, check_share
from allstep.plan.compression import FLOAT32_BYTES
from allstep.plan.workload import Workload

_ALL_REDUCES = 2  # of a block, in each of forward and backward


@dataclass(frozen=True, kw_only=True)
class TransformerSpec:
    """What the planner has to know of a transformer to divide it. See [Note: divided blocks].

    Args:
        depth: number of blocks.
        width: features of a token.
        heads: of the attention, which are divided.
        sequence_length: tokens of a sample.
        activation_bytes: of a feature of a token: 2 under autocast, else those of a parameter.
        measured_share: of a pass's seconds, those of the layers that are divided; None to count
            multiplications.

    Raises:
        UsageError: for numbers out of range, or heads that don't divide the width.

    >>> small = TransformerSpec(depth=4, width=128, heads=4, sequence_length=64)
    >>> small.local_params(1_062_656, 2)  # with 2,048 tokens; 790,016 are divided
    667648
    """

    depth: int
    width: int
    heads: int
    sequence_length: int
    activation_bytes: int = FLOAT32_BYTES
    measured_share: float | None = None

    def __post_init__(self) -> None:
        for name in ("depth", "width", "heads", "sequence_length"):
            check_integer(name, getattr(self, name))
        check_multiple("width", self.width, "heads", self.heads)
        if self.measured_share is not None:
            check_share("measured_share", self.measured_share)

    @property
    def divided_params(self) -> int:
        """Parameters of which a worker has a part."""
        return self.depth * (12 * self.width**2 + 7 * self.width)

    def outside_params(self, num_params: int) -> int:
        """Parameters that are in no block: embeddings and the last norm.

        Raises:
            UsageError: if there are fewer parameters than the blocks alone have.
        """
        in_blocks = self.divided_params + self.depth * 6 * self.width
        if num_params < in_blocks:
            raise UsageError(
                f"`params` (={num_params:,}) are fewer than the {in_blocks:,} of {self.depth}"
                f" blocks of `width` (={self.width}): correct one of them."
            )
        return num_params - in_blocks

    def check_tensor(self, tensor: int) -> None:
        """Refuses a length of the axis that doesn't divide the heads.

        Raises:
            UsageError: saying which lengths do.
        """
        if self.heads % tensor:
            raise UsageError(
                f"`tensor` (={tensor}) must divide the {self.heads} heads, of which each worker"
                " has as many."
            )

    def local_params(self, num_params: int, tensor: int) -> int:
        """Parameters of one worker."""
        return num_params - self.divided_params + self.divided_params // tensor

    def divided_share(self, num_params: int) -> float:
        """Share of the forward and backward pass that is divided."""
        if self.measured_share is not None:
            return self.measured_share
        width = self.width
        blocks = self.depth * (12 * width**2 + 2 * self.sequence_length * width)
        return blocks / (blocks + self.outside_params(num_params))

    def num_activations(self, num_samples: int) -> int:
        """Elements of what is summed over a copy's workers after half a block."""
        return num_samples * self.sequence_length * self.width

    def waits_s(self, all_reduce_s: float) -> float:
        """Seconds of a forward pass, or of a backward pass, in which a copy's workers wait.

        Args:
            all_reduce_s: seconds of the sum of `num_activations`.
        """
        return _ALL_REDUCES * self.depth * all_reduce_s

    def divide(self, workload: Workload, tensor: int, all_reduce_s: float) -> Workload:
        """A micro-batch's step of one of the workers of a copy, waits for activations included.

        When a share of the gradient is ready is taken to be the same as undivided.

        Args:
            workload: undivided.
            tensor: workers of a copy.
            all_reduce_s: seconds of the sum of `num_activations`.

        Raises:
            UsageError: if the heads don't divide, or the parameters aren't enough.

        >>> blocks = TransformerSpec(depth=1, width=4, heads=2, sequence_length=8)
        >>> whole = Workload(num_params=12 * 16 + 13 * 4, forward_s=1.0, backward_s=2.0)
        >>> half = blocks.divide(whole, 2, all_reduce_s=0.01)
        >>> half.num_params, half.forward_s, half.backward_s
        (134, 0.52, 1.02)
        """
        self.check_tensor(tensor)
        divided = self.divided_share(workload.num_params)
        if tensor == 1:
            return workload
        left, wait_s = divided / tensor + 1 - divided, self.waits_s(all_reduce_s)
        num_params = self.local_params(workload.num_params, tensor)
        return replace(
            workload,
            num_params=num_params,
            forward_s=left * workload.forward_s + wait_s,
            backward_s=left * workload.backward_s + wait_s,
            optimizer_s=workload.optimizer_s * num_params / workload.num_params,
            gradients=scaled_gradients(workload.gradients, num_params),
        )


def scaled_gradients(sizes: tuple[int, ...], total: int) -> tuple[int, ...]:
    """Whole sizes in nearly the same proportions, of another total; none of them is empty.

    >>> scaled_gradients((600, 300, 1), 450)
    (300, 150)
    """
    whole = sum(sizes)
    ends = [0, *(round(end * total / whole) for end in accumulate(sizes))]
    return tuple(late - early for early, late in pairwise(ends) if late > early)
