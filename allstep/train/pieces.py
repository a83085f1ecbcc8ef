"""Tensors of a checkpoint, whole or in pieces, as they are stored. [Note: divided checkpoints]"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from allstep.comm.codec import decode
from allstep.comm.layout import dtype_name, dtype_of_name
from allstep.errors import CheckpointError, UsageError
from allstep.nn import DividedTensor, Window
from allstep.train.devices import map_tensors

# The dtypes that a safetensors file can hold.
_DTYPES = {
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
}
# Suffix of the name of a tensor of another dtype, which is stored as bytes.
_OTHER_DTYPE = re.compile(r"\|(\w+)$")
# Suffix of the name of a piece: its window in the whole tensor.
_PLACE = re.compile(r"\[(\d+:\d+(?:,\d+:\d+)*)\]$")


def name_suffix(dtype: torch.dtype) -> str:
    """The suffix of the stored name of a tensor of this dtype."""
    return "" if dtype in _DTYPES else f"|{dtype_name(dtype)}"


def is_reserved(path: str, suffix: str) -> bool:
    """Whether the name has another meaning, to safetensors or to this module."""
    if path + suffix == "__metadata__" or _PLACE.search(path):
        return True
    return not suffix and bool(_OTHER_DTYPE.search(path))


def as_stored(tensor: Tensor) -> Tensor:
    """The tensor, or its bytes along an additional last dimension."""
    return tensor if tensor.dtype in _DTYPES else tensor.unsqueeze(-1).view(torch.uint8)


@dataclass(frozen=True)
class Piece:
    """A tensor, or a piece of one, that is stored under one name.

    Attributes:
        name: the name under which it is stored.
        num_bytes: its size in bytes.
        load: returns it as it is stored; pieces of other workers once only, in the pieces' order.
    """

    name: str
    num_bytes: int
    load: Callable[[], Tensor]


def pieces_of(
    tensors: Mapping[str, Tensor | DividedTensor], max_bytes: int, *, only_own: bool = False
) -> Iterator[Piece]:
    """All pieces that are stored, on rank 0; workers with parts of them call `send_pieces`.

    Args:
        tensors: name -> tensor, as `pack` returns them.
        max_bytes: largest size of a piece of a divided tensor.
        only_own: only the pieces that this worker has, and of parts only those of the first copy;
            no worker sends.
    """
    for name, x in tensors.items():
        if isinstance(x, Tensor):
            yield Piece(name, x.nbytes, x.detach)
            continue
        for rank, window in x.pieces(max_bytes):
            is_own = rank == x.comm.rank
            if only_own and not (is_own and x.is_first_copy):
                continue
            place = ",".join(map("{}:{}".format, window.start, window.stop))
            num_bytes = window.num_positions * x.dtype.itemsize
            load = partial(_own, x, window) if is_own else partial(_ask_for, x, rank, window)
            yield Piece(f"{name}[{place}]", num_bytes, load)


def send_pieces(tensors: Mapping[str, DividedTensor], max_bytes: int) -> None:
    """Sends this worker's parts to rank 0, which calls `pieces_of` for the same tensors."""
    for x in tensors.values():
        if x.is_first_copy:
            for rank, window in x.pieces(max_bytes):
                if rank == x.comm.rank:
                    x.piece(rank, window)


class Selection:
    """The parts of a checkpoint that a worker keeps, as its tensors are read one after the other.

    Args:
        data: the rest of the state, as `pack` encodes it.
        index: for each group: stored name -> tensor on the "meta" device, as it is stored.
        select: takes the state with whole tensors on the "meta" device, and returns the state that
            is wanted, with these tensors or with parts of them by ordinary indexing; None for all.

    Raises:
        CheckpointError: if a tensor, or a piece of one, is missing.
        UsageError: if `select` returns another tensor.
    """

    def __init__(
        self,
        data: bytes,
        index: Iterable[Mapping[str, Tensor]],
        select: Callable[[Any], Any] | None = None,
    ) -> None:
        wholes = _whole_tensors(dict(chain.from_iterable(group.items() for group in index)))
        names = {id(tensor): name for name, tensor in wholes.items()}
        self._data = data
        self._wanted: dict[str, list[Tensor]] = {name: [] for name in wholes}
        self._found: dict[int, Tensor] = {}

        def want(view: Tensor) -> Tensor:
            name = names.get(id(_base(view)))
            if name is None or not _is_box(view):
                raise UsageError(
                    f"`select` returned a tensor of shape {list(view.shape)} that is no part, by"
                    " slices, of one that it was given; transform what comes of it afterwards."
                )
            self._wanted[name].append(view)
            if not view.numel():
                self._found[id(view)] = torch.empty(view.shape, dtype=view.dtype)
            return view

        state = self._decoded(wholes)
        self._takes_all = select is None
        self._selected = None if select is None else map_tensors(select(state), want)
        if select is None:
            for tensor in wholes.values():
                want(tensor)

    def take(self, name: str, stored: Tensor, *, copy: bool) -> None:
        """Keeps the wanted part of a tensor, or of a piece.

        Args:
            name: the name under which it is stored.
            stored: the tensor or piece, as it is stored.
            copy: whether to copy it, because its memory is owned elsewhere.
        """
        of, window = _place(name)
        other = _OTHER_DTYPE.search(of)
        # Bytes may begin anywhere in a file's memory, and numbers of 16 bytes may not.
        x = stored if other is None else stored.clone().view(dtype_of_name(other[1])).squeeze(-1)
        window = window or Window.whole(x.shape)
        for view in self._wanted[of]:
            wanted = _window_of(view)
            both = wanted.intersect(window)
            if both == wanted == window:
                self._found[id(view)] = x.clone() if copy else x
            elif both.num_positions:
                if id(view) not in self._found:
                    self._found[id(view)] = torch.empty(view.shape, dtype=view.dtype)
                both.view(self._found[id(view)], wanted, 0).copy_(both.view(x, window, 0))

    def state(self) -> Any:
        """The wanted state, on the CPU, once all tensors were taken."""
        if not self._takes_all:
            return map_tensors(self._selected, lambda view: self._found[id(view)])
        return self._decoded({name: self._found[id(x)] for name, (x,) in self._wanted.items()})

    def _decoded(self, tensors: Mapping[str, Tensor]) -> Any:
        def load(name: str) -> Tensor:
            if name not in tensors:
                raise CheckpointError(f"the tensor {name} is missing")
            return tensors[name]

        return decode(self._data, load)


def _ask_for(x: DividedTensor, rank: int, window: Window) -> Tensor:
    piece = x.piece(rank, window)
    assert piece is not None  # on rank 0
    return as_stored(piece.cpu().contiguous())


def _own(x: DividedTensor, window: Window) -> Tensor:
    """A copy, as no two tensors of a file may share memory."""
    part = x.local_piece(window)
    return as_stored(part.to("cpu", copy=True, memory_format=torch.contiguous_format))


def _place(name: str) -> tuple[str, Window | None]:
    """The tensor's name, and the piece's window in it.

    >>> _place("model/weight[0:2,3:5]")
    ('model/weight', Window(start=(0, 3), stop=(2, 5)))
    """
    match = _PLACE.search(name)
    if match is None:
        return name, None
    bounds = [tuple(map(int, dim.split(":"))) for dim in match[1].split(",")]
    return name[: match.start()], Window(*zip(*bounds, strict=True))


def _whole_tensors(index: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name -> the whole tensor, on the "meta" device."""
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    num_positions: dict[str, int] = {}
    for entry, stored in index.items():
        name, window = _place(entry)
        other = _OTHER_DTYPE.search(name)
        dtypes[name] = stored.dtype if other is None else dtype_of_name(other[1])
        if window is None:
            window = Window.whole(stored.shape if other is None else stored.shape[:-1])
        shapes[name] = tuple(map(max, shapes.get(name, window.stop), window.stop))
        num_positions[name] = num_positions.get(name, 0) + window.num_positions
    for name, shape in shapes.items():
        if num_positions[name] != math.prod(shape):
            raise CheckpointError(f"a piece of the tensor {name} is missing")
    return {
        name: torch.empty(shape, dtype=dtypes[name], device="meta")
        for name, shape in shapes.items()
    }


def _base(view: Tensor) -> Tensor:
    return view if view._base is None else view._base


def _is_box(view: Tensor) -> bool:
    """Whether a view has the dimensions of its base, possibly shorter ones."""
    base = _base(view)
    is_even = view.dim() == base.dim() and all(
        length < 2 or stride == of_base
        for length, stride, of_base in zip(view.shape, view.stride(), base.stride(), strict=True)
    )
    if not (is_even and view.numel()):
        return is_even
    # [n, 1] and its transpose have equal strides.
    ends = zip(_window_of(view).stop, base.shape, strict=True)
    return all(stop <= of_base for stop, of_base in ends)


def _window_of(view: Tensor) -> Window:
    """The part of its base that a view by indexing shows."""
    start, offset = [], view.storage_offset()
    for stride in _base(view).stride():
        start.append(offset // max(stride, 1))
        offset %= max(stride, 1)
    stop = (a + length for a, length in zip(start, view.shape, strict=True))
    return Window(tuple(start), tuple(stop))
