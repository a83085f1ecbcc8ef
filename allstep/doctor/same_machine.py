"""Whether workers' machines compute alike: a fixed set of products and convolutions, hashed."""

from collections.abc import Callable, Mapping
from hashlib import blake2b

import torch
import torch.nn.functional as F
from torch import Tensor

from allstep.comm import Communicator


def compare_machines(comm: Communicator) -> dict[str, list[str]]:
    """Hashes of what each worker computes from the same numbers. Collective.

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
    own = computed_hashes(comm.device)
    every = comm.all_gather_object(own)
    return {name: [hashes[name] for hashes in every] for name in own}


def computed_hashes(device: torch.device) -> Mapping[str, str]:
    """Name of a computation -> hash of its results and gradients on the device."""
    return {name: _hash(compute(device)) for name, compute in _COMPUTATIONS.items()}


def _hash(tensors: list[Tensor]) -> str:
    digest = blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _noise(*shape: int, device: torch.device) -> Tensor:
    """Multiples of 2^-10 below 1, the same everywhere: no random generator, no library."""
    num = torch.Size(shape).numel()
    numbers = (torch.arange(num, dtype=torch.int64) * 48271 + 11) % 2039 - 1019
    return (numbers.to(torch.float32) / 1024).view(shape).to(device).requires_grad_()


def _with_gradients(output: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [output, *torch.autograd.grad(output.square().sum(), inputs)]


def _product(device: torch.device) -> list[Tensor]:
    a, b = _noise(96, 640, device=device), _noise(640, 130, device=device)
    return _with_gradients(a @ b, a, b)


def _convolution(device: torch.device) -> list[Tensor]:
    x, w = _noise(16, 32, 14, 14, device=device), _noise(48, 32, 3, 3, device=device)
    return _with_gradients(F.conv2d(x, w, padding=1), x, w)


def _norms(device: torch.device) -> list[Tensor]:
    x, w, b = (_noise(*s, device=device) for s in ((64, 48, 96), (96,), (96,)))
    return _with_gradients(F.gelu(F.layer_norm(x, (96,), w, b)), x, w, b)


def _attention(device: torch.device) -> list[Tensor]:
    q, k, v = (_noise(4, 4, 64, 32, device=device) for _ in range(3))
    return _with_gradients(F.scaled_dot_product_attention(q, k + 0.5, v), q, k, v)


def _loss(device: torch.device) -> list[Tensor]:
    x = _noise(256, 1000, device=device)
    loss = F.cross_entropy(4 * x, torch.arange(256, device=device))
    return [*_with_gradients(loss, x), x.sum(), x.norm(), x.exp().mean()]


_COMPUTATIONS: dict[str, Callable[[torch.device], list[Tensor]]] = {
    "products of matrices": _product,
    "convolutions": _convolution,
    "layer norm and GELU": _norms,
    "attention": _attention,
    "cross-entropy, exponentials and sums": _loss,
}
