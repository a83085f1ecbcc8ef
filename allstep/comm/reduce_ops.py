"""The possible reductions, and the form in which a tensor goes through one."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from allstep.comm.layout import Layout, dtype_name
from allstep.errors import UsageError, check_choice

ReduceOp = Literal["sum", "mean", "max", "min"]

_TORCH_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # divided at the end
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_INTEGERS = {torch.int8, torch.uint8, torch.int32, torch.int64}
_COMPLEX = {torch.complex64, torch.complex128}
_OF_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes -> integer of that size
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32}  # for dtypes no backend reduces


def check_reduction(tensors: Sequence[Tensor], op: str) -> None:
    """Raises UsageError if `op` is unknown or not defined for these tensors."""
    check_choice("op", op, get_args(ReduceOp))
    Layout.of(tensors)
    for tensor in tensors:
        _check_dtype(tensor.dtype, op)


def check_apart(tensors: Sequence[Tensor], verb: str) -> None:
    """Raises UsageError if tensors or elements share memory: a sum would count it twice."""
    for x in tensors:
        if any(step == 0 and length > 1 for step, length in zip(x.stride(), x.shape, strict=True)):
            raise UsageError(
                f"`x` has shape {list(x.shape)} and strides {list(x.stride())}: elements share"
                f" memory, and `{verb}` changes it in place; pass `x.clone()`, or `x` before"
                " `expand`."
            )
    spans = sorted((x.data_ptr(), x.nbytes, i) for i, x in enumerate(tensors) if _fills(x))
    for (start, nbytes, i), (next_start, _, j) in pairwise(spans):
        if next_start < start + nbytes:
            raise UsageError(
                f"entries {min(i, j)} and {max(i, j)} of `x` share memory, and `{verb}` changes"
                " them in place; pass a tensor once, or a `.clone()` of it."
            )


def _fills(x: Tensor) -> bool:
    """Whether a tensor occupies all memory from its first element to its last."""
    return x.is_contiguous() and x.numel() > 0


def _check_dtype(dtype: torch.dtype, op: str) -> None:
    name = dtype_name(dtype)
    if dtype == torch.bool:
        raise UsageError(
            f"`x` is bool, for which `op` (={op!r}) means nothing; use `max` or `min` on "
            "`x.to(torch.uint8)`: any and all."
        )
    if dtype in _COMPLEX:
        if op in ("max", "min"):
            raise UsageError(
                f"`x` is {name}, which has no order for `op` (={op!r}); use its `.abs()`."
            )
    elif dtype in _INTEGERS or dtype in _WIDER:
        if op == "mean":
            raise UsageError(
                f"`x` is {name}, whose mean is no integer; use `sum`, or `x.double()`."
            )
    elif dtype not in _FLOATS:
        raise UsageError(f"`x` is {name}, which cannot be reduced; use `x.float()` or `x.long()`.")


def torch_op(op: str) -> dist.ReduceOp.RedOpType:
    """The backend's operation for `op`."""
    return _TORCH_OPS[op]


def wire_form(tensor: Tensor, device: torch.device, op: str) -> Tensor:
    """The tensor in a form that a backend can reduce in place; `tensor` itself if it can.

    The mean of float16 is taken in float32: the sum may exceed 65,504 where the mean does not. For
    "max" and "min", floats are mapped to integers in the same order: Gloo's maximum loses NaN.
    """
    plain = tensor.detach().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    if op in ("max", "min") and plain.is_floating_point():
        plain = _in_order(plain, op)
    dtype = _WIDER.get(plain.dtype, plain.dtype)
    if op == "mean" and dtype == torch.float16:
        dtype = torch.float32
    return plain.to(device=device, dtype=dtype).contiguous()


def write_back(tensor: Tensor, reduced: Tensor, divisor: int) -> Tensor:
    """Writes a reduced wire form, divided by `divisor`, into `tensor`."""
    if divisor != 1:
        reduced.div_(divisor)
    target = tensor.detach()
    if target.is_floating_point() and not reduced.is_floating_point():
        reduced = _swap_order(reduced.to(_OF_BITS[target.itemsize])).view(target.dtype)
    if reduced.data_ptr() != target.data_ptr():  # otherwise it was reduced in place
        if target.is_complex():
            target.copy_(torch.view_as_complex(reduced))
        else:
            # torch's own conversion to float16 ignores the target's negative bit.
            target.copy_(reduced.to(target.dtype))
    return tensor


def _in_order(x: Tensor, op: str) -> Tensor:
    """Integers in the order of the floats; NaN becomes the extreme that `op` picks."""
    found = _swap_order(x.contiguous().view(_OF_BITS[x.itemsize]))
    limits = torch.iinfo(found.dtype)
    return found.masked_fill_(x.isnan(), limits.max if op == "max" else limits.min)


def _swap_order(bits: Tensor) -> Tensor:
    """Maps floats' bits to integers in the same order, and back; flips those of negatives."""
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)
