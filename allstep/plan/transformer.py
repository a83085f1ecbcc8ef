"""The parameters of a transformer, and the time of its step under tensor parallelism.

[Note: divided blocks] A block has query, key, value and output matrices of w x w for w features,
and an MLP of w x 4w x w. Query, key, value and the MLP's first matrix are divided by columns, the
other two by rows, so that activations are whole again after each half block: there the workers of a
copy wait for the sum of their activations, and in the backward pass for the sum of their gradients.
The embeddings of v tokens, which also compute the logits, are divided by tokens, but not in a
pipeline. r of the n parameters are outside the blocks: these embeddings, those of positions, and
the last norm, hence

    v w = r - (s + 2) w

where s is the length of a sequence. Each of t workers has

    n - (1 - 1/t) (depth (12 w^2 + 7 w) + v w)

parameters, and its share of a step's compute, of which the share d is divided, is

    d/t + 1 - d

where d is measured, or 1, as all multiplications are in the blocks and the logits. The latter
neglects operations without matrices, which take a quarter of the time in small models on CPUs. In a
pipeline, where logits are whole, d is the blocks' share of a token's multiplications:

    d = depth (12 w^2 + 2 s w) / (depth (12 w^2 + 2 s w) + v w)

Source: Shoeybi et al., Megatron-LM, 2019, arXiv:1909.08053, section 3.
"""

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from allstep.errors import UsageError, check_integer, check_multiple, check_share
from allstep.plan.compression import FLOAT32_BYTES
from allstep.plan.workload import Workload

_ALL_REDUCES = 2  # per block in the forward pass, and as many in the backward pass


@dataclass(frozen=True, kw_only=True)
class TransformerSpec:
    """The size of a transformer, as needed to divide it. See [Note: divided blocks].

    Args:
        depth: number of blocks.
        width: features of a token.
        heads: number of attention heads, which are divided among workers.
        sequence_length: tokens of a sample.
        activation_bytes: bytes of a token's feature: 2 under autocast, else those of a parameter.
        measured_share: share of a pass's seconds in the divided layers of the blocks; None to count
            multiplications.
        measured_logits_share: share of a pass's seconds in the logits, if this was measured.

    Raises:
        UsageError: for numbers out of range, or heads that don't divide the width.

    >>> small = TransformerSpec(depth=4, width=128, heads=4, sequence_length=64)
    >>> small.local_params(1_062_656, 2)  # of 790,016 and of 2,040 tokens' embeddings half
    537088
    """

    depth: int
    width: int
    heads: int
    sequence_length: int
    activation_bytes: int = FLOAT32_BYTES
    measured_share: float | None = None
    measured_logits_share: float = 0.0

    def __post_init__(self) -> None:
        for name in ("depth", "width", "heads", "sequence_length"):
            check_integer(name, getattr(self, name))
        check_multiple("width", self.width, "heads", self.heads)
        if self.measured_share is not None:
            check_share("measured_share", self.measured_share)
        check_share("measured_logits_share", self.measured_logits_share)

    @property
    def divided_params(self) -> int:
        """Parameters of the blocks that are divided among workers."""
        return self.depth * (12 * self.width**2 + 7 * self.width)

    def block_params(self, tensor: int) -> int:
        """Parameters of a block on one of `tensor` workers."""
        return self.divided_params // self.depth // tensor + 6 * self.width

    def outside_params(self, num_params: int) -> int:
        """Parameters outside the blocks: embeddings and the last norm.

        Raises:
            UsageError: if there are fewer parameters than the blocks have.
        """
        in_blocks = self.depth * self.block_params(1)
        if num_params < in_blocks:
            raise UsageError(
                f"`params` (={num_params:,}) are fewer than the {in_blocks:,} of {self.depth}"
                f" blocks of `width` (={self.width}): correct one of them."
            )
        return num_params - in_blocks

    def vocabulary_params(self, num_params: int) -> int:
        """Parameters of the token embeddings, a part of `outside_params`."""
        whole = (self.sequence_length + 2) * self.width
        return max(0, self.outside_params(num_params) - whole)

    def check_tensor(self, tensor: int) -> None:
        """Checks that the heads divide evenly among `tensor` workers.

        Raises:
            UsageError: if they don't.
        """
        if self.heads % tensor:
            raise UsageError(
                f"`tensor` (={tensor}) must divide the {self.heads} heads, of which each worker"
                " has as many."
            )

    def local_params(self, num_params: int, tensor: int) -> int:
        """Parameters on one of `tensor` workers, without a pipeline."""
        vocabulary = self.vocabulary_params(num_params)
        whole = self.outside_params(num_params) - vocabulary
        return self.depth * self.block_params(tensor) + vocabulary // tensor + whole

    @property
    def divided_share(self) -> float:
        """Share of the forward and backward pass that is divided if there is no pipeline."""
        if self.measured_share is not None:
            return min(1.0, self.measured_share + self.measured_logits_share)
        return 1.0

    def block_share(self, num_params: int) -> float:
        """Share of the forward and backward pass that is divided in a pipeline."""
        if self.measured_share is not None:
            return self.measured_share
        width = self.width
        blocks = self.depth * (12 * width**2 + 2 * self.sequence_length * width)
        return blocks / (blocks + self.vocabulary_params(num_params))

    def num_activations(self, num_samples: int) -> int:
        """Elements of the activations that a copy's workers sum after each half block."""
        return num_samples * self.sequence_length * self.width

    def waits_s(self, all_reduce_s: float) -> float:
        """Seconds for which a copy's workers wait in a forward pass, and as many in a backward.

        Args:
            all_reduce_s: seconds of the sum of `num_activations`.
        """
        return _ALL_REDUCES * self.depth * all_reduce_s

    def divide(self, workload: Workload, tensor: int, all_reduce_s: float) -> Workload:
        """A micro-batch's step on one of the workers of a copy, waits for activations included.

        `ready`, which says when each share of the gradient is ready, stays as it is undivided.

        Args:
            workload: the step on one worker, undivided.
            tensor: number of workers of a copy.
            all_reduce_s: seconds of the sum of `num_activations`.

        Raises:
            UsageError: if the heads don't divide evenly, or there are too few parameters.

        >>> blocks = TransformerSpec(depth=1, width=4, heads=2, sequence_length=8)
        >>> whole = Workload(num_params=12 * 16 + 13 * 4, forward_s=1.0, backward_s=2.0)
        >>> half = blocks.divide(whole, 2, all_reduce_s=0.01)
        >>> half.num_params, half.forward_s, half.backward_s
        (134, 0.52, 1.02)
        """
        self.check_tensor(tensor)
        if tensor == 1:
            return workload
        divided = self.divided_share
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
    """Integer sizes with a new total in nearly the same proportions, without those that become 0.

    >>> scaled_gradients((600, 300, 1), 450)
    (300, 150)
    """
    whole = sum(sizes)
    ends = [0, *(round(end * total / whole) for end in accumulate(sizes))]
    return tuple(late - early for early, late in pairwise(ends) if late > early)
