"""The verbs that reduce tensors over the ranks."""

from collections.abc import Sequence
from typing import Literal, TypeVar, overload

import torch
from torch import Tensor

from allstep.comm.algorithms import AllReduce, check_algorithm, make_algorithm
from allstep.comm.base import CommunicatorBase
from allstep.comm.group import Topology
from allstep.comm.layout import Layout, as_tuple
from allstep.comm.reduce_ops import (
    ReduceOp,
    check_apart,
    check_reduction,
    torch_op,
    wire_form,
    write_back,
)
from allstep.comm.wire import Wire
from allstep.comm.work import CompletedWork, JoinedWork, Work
from allstep.errors import UsageError, nearest_multiples

X = TypeVar("X", Tensor, Sequence[Tensor], Tensor | Sequence[Tensor])


class Reductions(CommunicatorBase):
    """Reductions of tensors of equal shapes and dtypes on all ranks."""

    def become(self, wire: Wire, topology: Topology) -> None:
        super().become(wire, topology)
        self._agreed: set[object] = set()
        self._algorithms: dict[str, AllReduce] = {}

    @overload
    def all_reduce(
        self,
        x: X,
        op: ReduceOp = ...,
        *,
        algorithm: str | None = ...,
        check: bool | None = ...,
        async_op: Literal[False] = ...,
    ) -> X: ...
    @overload
    def all_reduce(
        self,
        x: X,
        op: ReduceOp = ...,
        *,
        algorithm: str | None = ...,
        check: bool | None = ...,
        async_op: Literal[True],
    ) -> Work[X]: ...
    def all_reduce(
        self,
        x: X,
        op: ReduceOp = "sum",
        *,
        algorithm: str | None = None,
        check: bool | None = None,
        async_op: bool = False,
    ) -> X | Work[X]:
        """Reduces over the ranks, in place, on all of them.

        x = reduction of x_r over ranks r; `mean` is the sum divided by `size`.

        Args:
            x: tensor or tuple of tensors of equal shapes and dtypes on every rank.
            op: "sum", "mean" (not of integers), "max" or "min"; NaN where any rank has NaN.
            algorithm: how the sum is taken: a name in `allstep.comm.algorithms.ALGORITHMS`, by
                which several tensors are summed as one. None for the backend's own, tensor by
                tensor.
            check: whether the ranks first compare what they want to reduce, with one small extra
                message; the same on all. None compares only what this rank has not reduced before:
                afterwards, ranks that disagree get wrong values, or Gloo ends their process.
            async_op: return at once; do not touch `x` until you have waited for the result. With
                an `algorithm` other than "native" the call itself still does all the work.

        Returns:
            `x` itself; with `async_op` a Work that returns it.

        Raises:
            UsageError: if `op` is unknown or not defined for a dtype, if `algorithm` is unknown or
                cannot take a maximum, or if tensors of `x` share memory.
            DisagreementError: on every rank, if the ranks compare and differ in shapes, dtypes,
                `op` or `algorithm`, or if some call another verb with `check`.

        >>> from allstep.comm import Communicator
        >>> Communicator.single_process().all_reduce(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
        """
        tensors = as_tuple(x)
        check_reduction(tensors, op)
        check_apart(tensors, "all_reduce")
        if algorithm not in (None, "native"):
            check_algorithm(algorithm)
            if op not in ("sum", "mean"):
                raise UsageError(
                    f"`op` (={op!r}) is not what `algorithm` (={algorithm!r}) can do; pass `sum` "
                    "or `mean`, or omit `algorithm`."
                )
            self._agree("all_reduce", tensors, f"{op} ({algorithm})", check)
            self._reduce_by(self._algorithm(algorithm), tensors, op)
            return CompletedWork(x) if async_op else x
        self._agree("all_reduce", tensors, op, check)
        reduced = self._wire_forms(tensors, op)
        posted = [self.wire.all_reduce(form, torch_op(op), "all_reduce") for form in reduced]
        divisor = self.size if op == "mean" else 1

        def finish() -> X:
            for tensor, form in zip(tensors, reduced, strict=True):
                write_back(tensor, form, divisor)
            return x

        work = JoinedWork(posted, finish)
        return work if async_op else work.wait()

    def _wire_forms(self, xs: Sequence[Tensor], op: str) -> list[Tensor]:
        return [wire_form(x, self.wire.transport_device(x.device), op) for x in xs]

    def _reduce_by(self, algorithm: AllReduce, tensors: Sequence[Tensor], op: str) -> None:
        """Sums or means of tensors; all tensors of a dtype are summed as one."""
        forms = self._wire_forms(tensors, op)
        divisor = self.size if op == "mean" else 1
        for kind in dict.fromkeys((form.dtype, form.device) for form in forms):
            chosen = [i for i, form in enumerate(forms) if (form.dtype, form.device) == kind]
            flats = [forms[i].view(-1) for i in chosen]
            packed = flats[0] if len(flats) == 1 else torch.cat(flats)
            algorithm.reduce_(packed)
            parts = torch.split(packed, [flat.numel() for flat in flats])
            for i, part in zip(chosen, parts, strict=True):
                write_back(tensors[i], part.view(forms[i].shape), divisor)

    def _algorithm(self, name: str) -> AllReduce:
        """The algorithm of that name, made when it is first used."""
        if name not in self._algorithms:
            self._algorithms[name] = make_algorithm(name, self)  # type: ignore[arg-type]
        return self._algorithms[name]

    def _close_algorithms(self) -> None:
        for algorithm in self._algorithms.values():
            algorithm.close()
        self._algorithms.clear()

    @overload
    def reduce_scatter(
        self,
        x: Tensor | Sequence[Tensor],
        op: ReduceOp = ...,
        *,
        check: bool | None = ...,
        async_op: Literal[False] = ...,
    ) -> Tensor: ...
    @overload
    def reduce_scatter(
        self,
        x: Tensor | Sequence[Tensor],
        op: ReduceOp = ...,
        *,
        check: bool | None = ...,
        async_op: Literal[True],
    ) -> Work[Tensor]: ...
    def reduce_scatter(
        self,
        x: Tensor | Sequence[Tensor],
        op: ReduceOp = "sum",
        *,
        check: bool | None = None,
        async_op: bool = False,
    ) -> Tensor | Work[Tensor]:
        """Reduces over the ranks and leaves each of them its part; `x` stays as it is.

        Args:
            x: tensor whose dim 0 is a multiple of `size`, or a tuple of `size` tensors, one for
                each rank; equal shapes and dtypes on every rank.
            op: "sum", "mean" (not of integers), "max" or "min".
            check: as in `all_reduce`.
            async_op: return a Work at once.

        Raises:
            UsageError: if `x` cannot be divided, or `op` is not defined for its dtype.
            DisagreementError: as in `all_reduce`.
        """
        parts = self._parts(x)
        check_reduction(parts, op)
        self._agree("reduce_scatter", parts, op, check)
        forms = self._wire_forms(parts, op)
        reduced, posted = self.wire.reduce_scatter(forms, torch_op(op), "reduce_scatter")
        divisor = self.size if op == "mean" else 1
        result = torch.empty_like(parts[self.rank], memory_format=torch.contiguous_format)

        work = JoinedWork([posted], lambda: write_back(result, reduced, divisor))
        return work if async_op else work.wait()

    def _parts(self, x: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
        if not isinstance(x, Tensor):
            return as_tuple(self._check_one_per_rank("x", x))
        Layout.of(x)  # refuses sparse tensors, which can't be divided
        length = x.shape[0] if x.dim() else 0
        if x.dim() == 0 or length % self.size:
            raise UsageError(
                f"`x` has shape {list(x.shape)}, whose dim 0 must be a multiple of `size` "
                f"(={self.size}); nearest: {nearest_multiples(length, self.size)}."
            )
        return x.chunk(self.size) if length else (x,) * self.size

    def _agree(self, verb: str, tensors: Sequence[Tensor], op: str, check: bool | None) -> None:
        """Compares what the ranks want to reduce; with `check` None only what is new to this rank.

        With unequal shapes backends give wrong values or end the process, so this is worth one
        message.
        """
        if self.size == 1 or check is False:
            return
        signature = (verb, op, *((x.shape, x.dtype, x.device.type) for x in tensors))
        if signature in self._agreed and not check:
            return
        devices = ", ".join(sorted({tensor.device.type for tensor in tensors}))
        wanted = f"with {op} of {Layout.of(tensors)} on {devices or 'no device'}"
        self._compare(verb, wanted, "shapes, dtypes and `op`")
        self._agreed.add(signature)
