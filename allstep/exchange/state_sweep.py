"""Compares the workers' models and optimizers while they train, a part in each exchange.

[Note: state sweep] All workers start with one model and apply the same gradients with the same
rates. If some of them edit a parameter, load a state or draw noise, their models diverge forever,
and gradients don't show it. So each exchange compares the bits of a part of the parameters, and the
options of the optimizers' last steps: `piggyback` adds a checksum to the numbers that are sent
anyway. The parts take turns; a sweep over the model takes at most `NUM_PARTS` exchanges, or one for
each `_MOST_TENSORS` of its tensors if that is more.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from allstep.device import is_accelerator, read_scalars

NUM_PARTS = 128
_FEWEST_WORDS = 1 << 13  # of a part; fewer take as long
_MOST_TENSORS = 16  # in a part; each takes some calls
_MOST_WORDS = 1 << 20  # that are looked at together, at eight bytes each
_PRIME = (1 << 28) - 57
_PARAMETERS = ("params", "param_names")  # of a group; divided ones are each worker's own
_WORDS = {1: torch.uint8, 2: torch.int16}

Entries = tuple[tuple[str, str], ...]
"""Names and values in words, as `comm.agreement.explain` takes them."""

Rates = tuple[str, int, Mapping[str, Any]]
"""An optimizer's class, the group of its parameters, and that group's settings by name."""


def words_of(tensor: Tensor) -> Tensor:
    """The bits of a tensor as whole numbers, in memory order; [numbers].

    >>> words_of(torch.tensor([[0.0, 1.0], [-2.0, 0.5]]).t())
    tensor([          0,  1065353216, -1073741824,  1056964608], dtype=torch.int32)
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not tensor.is_contiguous():
        strides = tensor.stride()
        tensor = tensor.permute(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))
    return tensor.reshape(-1).contiguous().view(_WORDS.get(tensor.itemsize, torch.int32))


def checksum(words: Tensor) -> Tensor:
    """A number below 2^28 that depends on each word and its place; on the words' device.

    >>> checksum(torch.tensor([1, 2])), checksum(torch.tensor([2, 1]))
    (tensor(5), tensor(4))
    """
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), _MOST_WORDS):
        piece = words[start : start + _MOST_WORDS]
        places = torch.arange(start + 1, start + 1 + len(piece), device=words.device)
        total += places.mul_(piece).sum()
    return total.remainder_(_PRIME)


def is_comparable(tensor: Tensor) -> bool:
    """Whether this worker has all of the tensor's bits."""
    is_whole = not is_lazy(tensor) and not is_traceable_wrapper_subclass(tensor)
    is_stored = not (tensor.is_meta or tensor.is_quantized)
    return is_whole and is_stored and tensor.layout == torch.strided


def tensor_checksums(tensors: Mapping[str, Tensor]) -> Entries:
    """A checksum of each whole tensor, as text."""
    sums = {n: checksum(words_of(t)) for n, t in tensors.items() if is_comparable(t)}
    return tuple(
        (f"values of {name}", f"checksum {number:07x}")
        for name, number in zip(sums, read_scalars(list(sums.values())), strict=True)
    )


def rates_of(optimizer: Optimizer, group: int) -> Rates:
    """The options that an optimizer updates a group of parameters with.

    Tensors on a device are left out, because reading them would make the host wait.

    >>> layer = torch.nn.Linear(2, 1)
    >>> kind, group, settings = rates_of(torch.optim.SGD(layer.parameters(), lr=0.1), 0)
    >>> kind, group, settings["lr"], settings["momentum"]
    ('SGD', 0, 0.1, 0)
    """
    settings = {
        name: number
        for name, value in optimizer.param_groups[group].items()
        if name not in _PARAMETERS and (number := _number(value)) is not None
    }
    return type(optimizer).__name__, group, settings


def _number(value: Any) -> Any:
    """An option that is plain data or a one-element CPU tensor, as plain data; else None."""
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and not is_accelerator(value.device) else None
    return tuple(map(_number, value)) if isinstance(value, (tuple, list)) else None


@dataclass(frozen=True)
class StatePart:
    """The part of the state that one exchange compares.

    Attributes:
        tensors: name -> number of its words.
        words: the bits of parts of tensors, concatenated.
        num_updates: number of optimizers' steps since the last exchange.
        rates: the options of each optimizer that made one.
    """

    tensors: Mapping[str, int]
    words: Tensor
    num_updates: int
    rates: tuple[Rates, ...]

    def entries(self) -> Entries:
        """The part as text, for the error; waits for the device."""
        found = [("updates since the last exchange", str(self.num_updates))]
        for index, (kind, group, settings) in enumerate(self.rates):
            of = f" of optimizer {index}" if len(self.rates) > 1 else ""
            found += [(f"{kind}'s {n} in group {group}{of}", repr(x)) for n, x in settings.items()]
        pieces = torch.split(self.words, list(self.tensors.values()))
        for name, piece in zip(self.tensors, pieces, strict=True):
            found.append((f"values of {name}", f"checksum {int(checksum(piece)):07x}"))
        return tuple(found)


class StateSweep:
    """Chooses the parts in turn. [Note: state sweep]"""

    def __init__(self) -> None:
        self._parts: list[dict[str, slice]] = []
        self._tensors: Mapping[str, Tensor] = {}
        self._updates: dict[int, Rates] = {}  # id of an optimizer -> the rates of its last step
        self._num_updates = 0

    def set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Sets the tensors that are compared; the same names on every worker."""
        self._tensors = {name: t for name, t in tensors.items() if is_comparable(t)}
        self._parts = list(_split(self._tensors))

    def has_updated(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has made a step since the last exchange."""
        return id(optimizer) in self._updates

    def note_update(self, optimizer: Optimizer, number: int) -> None:
        """Called when an optimizer of these tensors makes a step.

        Args:
            optimizer: the optimizer, in its state at the step.
            number: number of the last exchange; decides which group's turn it is.
        """
        group = number % len(optimizer.param_groups)
        self._updates[id(optimizer)] = rates_of(optimizer, group)
        self._num_updates += 1

    def next_part(self, number: int, device: torch.device) -> StatePart:
        """The part that an exchange compares.

        Args:
            number: the exchange's number.
            device: the device for the words.
        """
        turn = self._parts[number % len(self._parts)] if self._parts else {}
        pieces = [words_of(self._tensors[name])[part].to(device) for name, part in turn.items()]
        words = torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int32, device=device)
        tensors = dict(zip(turn, map(len, pieces), strict=True))
        state = StatePart(tensors, words, self._num_updates, tuple(self._updates.values()))
        self._updates.clear()
        self._num_updates = 0
        return state


def _split(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, slice]]:
    """Parts of one or a few tensors each: name -> range of its words."""
    sizes = {
        name: tensor.numel() * max(1, tensor.itemsize // 4) for name, tensor in tensors.items()
    }
    most = max(_FEWEST_WORDS, -(-sum(sizes.values()) // NUM_PARTS))
    part: dict[str, slice] = {}
    room = most
    for name, size in sizes.items():
        start = 0
        while start < size:
            stop = min(size, start + room)
            part[name] = slice(start, stop)
            room -= stop - start
            start = stop
            if not room or len(part) == _MOST_TENSORS:
                yield part
                part, room = {}, most
    if part:
        yield part
