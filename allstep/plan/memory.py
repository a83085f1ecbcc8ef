"""Bytes that a worker of a mesh needs.

For n local parameters of b bytes, k optimizer states of each, and a micro-batch of T tokens, in
bytes:

    parameters     n b
    gradients      n b            (buckets are the gradients' own memory)
    optimizer      k n b
    activations    T a (w (depth (6 + 12/t) + 3) + 3 v)

a are the bytes of an activation, w the width, t the workers of a copy and v = r / w the logits of a
token, with r as in [Note: divided blocks]. A block keeps for its backward pass the inputs and
outputs of its two norms and the factors of its two dropouts, which are whole (6 w), and queries,
keys, values, attention, and the hidden features before and after GELU, which are divided
(12 w / t). The embeddings' dropout and the last norm keep 3 w; logits, their logarithms and their
gradients are 3 v. It is for attention that keeps no scores (flash) and without activation
checkpointing; what the framework, kernels and collectives take beside is not in it.
"""

from dataclasses import dataclass

from allstep.plan.transformer import TransformerSpec
from allstep.plan.workload import Workload

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Of one worker, in bytes.

    Attributes:
        parameters, gradients, optimizer: of its part of the model.
        activations: of one micro-batch at the end of the forward pass.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer + self.activations

    @property
    def total_gib(self) -> float:
        """All of them in GiB."""
        return self.total / GIB


def memory_of(
    micro: Workload, transformer: TransformerSpec, tensor: int = 1, states_per_param: float = 2
) -> Memory:
    """What a worker of a copy needs.

    Args:
        micro: an undivided micro-batch's step.
        transformer: which is divided.
        tensor: workers of a copy.
        states_per_param: of the optimizer, each as large as the parameters: 2 of AdamW, 1 of SGD
            with momentum.

    Returns:
        Its bytes.

    >>> micro = Workload.from_step(num_params=1_062_656, step_s=0.1, num_samples=16)
    >>> small = TransformerSpec(depth=4, width=128, heads=4, sequence_length=64)
    >>> [f"{memory_of(micro, small, tensor).total / 1e6:.1f} MB" for tensor in (1, 2)]
    ['82.2 MB', '63.3 MB']
    """
    local = transformer.local_params(micro.num_params, tensor)
    num_bytes = local * micro.element_bytes
    width = transformer.width
    kept = width * (transformer.depth * (6 + 12 / tensor) + 3)
    kept += 3 * transformer.outside_params(micro.num_params) / width
    num_tokens = micro.num_samples * transformer.sequence_length
    return Memory(
        parameters=num_bytes,
        gradients=num_bytes,
        optimizer=round(states_per_param * num_bytes),
        activations=round(num_tokens * transformer.activation_bytes * kept),
    )
