"""Compares the workers' machines by hashes of a fixed set of products and convolutions."""

from collections.abc import Iterator
from hashlib import blake2b

import torch
import torch.nn.functional as F
from torch import Tensor

from allstep.comm import Communicator


def compare_machines(comm: Communicator) -> dict[str, list[str]]:
    """Hashes of each worker's results from the same numbers. Collective.

    Where they differ, processors, libraries or numbers of threads do, and exact sums of gradients
    give the same bits only on workers whose hashes agree.

    Args:
        comm: the workers.

    Returns:
        Name of what was computed -> each rank's hash.

    >>> found = compare_machines(Communicator.single_process())
    >>> [name for name, hashes in found.items() if len(set(hashes)) > 1]
    []
    """
    own = {name: _hash(tensors) for name, tensors in _computations(comm.device)}
    every = comm.all_gather_object(own)
    return {name: [hashes[name] for hashes in every] for name in own}


def _hash(tensors: list[Tensor]) -> str:
    digest = blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _computations(device: torch.device) -> Iterator[tuple[str, list[Tensor]]]:
    """Yields names of computations, each with its results and gradients on the device."""

    def noise(*shape: int) -> Tensor:
        """Multiples of 2^-10 below 1, the same on all machines, as no random generator is used."""
        num = torch.Size(shape).numel()
        numbers = (torch.arange(num, dtype=torch.int64) * 48271 + 11) % 2039 - 1019
        return (numbers.to(torch.float32) / 1024).view(shape).to(device).requires_grad_()

    a, b = noise(96, 640), noise(640, 130)
    yield "products of matrices", _with_gradients(a @ b, a, b)
    x, w = noise(16, 32, 14, 14), noise(48, 32, 3, 3)
    yield "convolutions", _with_gradients(F.conv2d(x, w, padding=1), x, w)
    x, w, b = noise(64, 48, 96), noise(96), noise(96)
    yield "layer norm and GELU", _with_gradients(F.gelu(F.layer_norm(x, (96,), w, b)), x, w, b)
    q, k, v = (noise(4, 4, 64, 32) for _ in range(3))
    out = F.scaled_dot_product_attention(q, k + 0.5, v)
    yield "attention", _with_gradients(out, q, k, v)
    x = noise(256, 1000)
    loss = F.cross_entropy(4 * x, torch.arange(256, device=device))
    results = [*_with_gradients(loss, x), x.sum(), x.norm(), x.exp().mean()]
    yield "cross-entropy, exponentials and sums", results


def _with_gradients(output: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [output, *torch.autograd.grad(output.square().sum(), inputs)]
