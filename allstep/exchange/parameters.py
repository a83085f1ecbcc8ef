"""The parameters that take part in an exchange, as the model changes."""

from collections.abc import Container, Iterable, Iterator
from operator import gt, is_, lt
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from allstep.comm import DividedModules, divided_modules, divided_prefixes, fsdp_modules
from allstep.exchange.attachable import check_module, check_tensor
from allstep.torch_classes import is_dtensor

Signature = tuple[tuple[str, tuple[int, ...], str], ...]


def signature(tensors: dict[str, Tensor]) -> Signature:
    """Name, shape and kind of each tensor, which must be equal on all workers."""
    return tuple(
        (name, () if is_lazy(t) else tuple(t.shape), "lazy" if is_lazy(t) else _kind(t))
        for name, t in tensors.items()
    )


def _kind(tensor: Tensor) -> str:
    """The dtype, the memory order if it is not contiguous, and whether the tensor is frozen.

    Elements are summed in memory order, and frozen parameters are not exchanged.
    """
    kind = str(tensor.dtype)
    if not tensor.is_contiguous():
        kind += f" with strides {tensor.stride()}"
    if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
        kind += " without gradient"
    return kind


def sparse_gradient_message(name: str) -> str:
    """The error for a parameter whose gradient can't be exchanged."""
    return (
        f"Parameter `{name}` has a sparse gradient, which can't be exchanged; build its layer with"
        " `sparse=False`."
    )


class Snapshot:
    """A snapshot of modules and their parameters, to detect changes; comparing is cheap."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.note(modules)

    def note(self, modules: Iterable[nn.Module]) -> None:
        """Takes a snapshot of the modules."""
        self._children = tuple(_children(modules))
        self._lengths = tuple(map(len, self._children))
        items = [(c, key, value) for c in self._children for key, value in c.items()]
        self._holders = tuple(holder for holder, _, _ in items)
        self._keys = tuple(key for _, key, _ in items)
        self._values = tuple(value for _, _, value in items)
        self._parameters = tuple(v for v in self._values if isinstance(v, nn.Parameter))
        self._requires_grad = tuple(p.requires_grad for p in self._parameters)

    def has_changed(self) -> bool:
        """Whether parameters or modules came, went, or changed `requires_grad`."""
        return self.has_joined() or self.has_frozen()

    def has_joined(self) -> bool:
        """Whether parameters or modules came or went, or some now require gradients; cheap."""
        return (
            tuple(map(len, self._children)) != self._lengths
            or self._are_replaced()
            or any(map(gt, [p.requires_grad for p in self._parameters], self._requires_grad))
        )

    def _are_replaced(self) -> bool:
        """Whether parameters were replaced, except by `functional_call` for a single forward."""
        present = tuple(map(dict.get, self._holders, self._keys))
        if all(map(is_, present, self._values)):
            return False
        return any(
            new is not old and (isinstance(new, nn.Parameter) or not isinstance(new, Tensor))
            for new, old in zip(present, self._values, strict=True)
        )

    def has_frozen(self) -> bool:
        """Whether parameters no longer require gradients; cheap."""
        return any(map(lt, [p.requires_grad for p in self._parameters], self._requires_grad))


class ParameterSet(Snapshot):
    """A model's parameters that require gradients, in the model's order, each once.

    Parameters of divided modules are not included [Note: divided parameters], nor those that FSDP2
    has sharded, whose modules hold other tensors during a pass. [Note: fully sharded models]

    Attributes:
        trained: name -> parameter that requires a gradient and has a shape.
        fully_sharded: name -> this worker's shard of a parameter that FSDP2 has sharded, frozen or
            not.
        tensors: name -> parameter or buffer that has a shape.
        modules: all modules.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.trained: dict[str, nn.Parameter] = {}
        self.tensors: dict[str, Tensor] = {}
        self._left_out = left_out_of_shards(model)
        self.refresh()

    def refresh(self) -> tuple[dict[str, Tensor], dict[str, nn.Parameter]]:
        """Adapts to the present model.

        Returns:
            The new entries of `tensors` and of `trained`.
        """
        known, trained = (set(map(id, x.values())) for x in (self.tensors, self.trained))
        check_module(self._model)
        own = {m for divided in divided_modules(self._model).values() for m in divided.modules()}
        self.modules = tuple(module for module in self._model.modules() if module not in own)
        is_fully_sharded = bool(fsdp_modules(self._model))
        self.note(self._left_out if is_fully_sharded else self.modules)
        prefixes = divided_prefixes(self._model)
        parameters = {
            name: p for name, p in self._model.named_parameters() if not name.startswith(prefixes)
        }
        self._ids = set(map(id, parameters.values()))
        self.fully_sharded: dict[str, nn.Parameter] = {}
        if is_fully_sharded:
            left_out = {id(p) for module in self._left_out for p in module._parameters.values()}
            sharded = [name for name, p in parameters.items() if id(p) not in left_out]
            self.fully_sharded = {name: parameters.pop(name) for name in sharded}
        buffers = {
            name: b for name, b in self._model.named_buffers() if not name.startswith(prefixes)
        }
        self.trained = {n: p for n, p in parameters.items() if p.requires_grad and not is_lazy(p)}
        tensors: dict[str, Tensor] = {**parameters, **buffers}
        self.tensors = {name: tensor for name, tensor in tensors.items() if not is_lazy(tensor)}
        for name, tensor in self.tensors.items():
            check_tensor(name, tensor)
        self.lazy = tuple(tensor for tensor in tensors.values() if is_lazy(tensor))
        return (
            {name: tensor for name, tensor in self.tensors.items() if id(tensor) not in known},
            {name: p for name, p in self.trained.items() if id(p) not in trained},
        )

    def has_joined(self) -> bool:
        """Whether parameters or modules came or went, or some now require gradients; cheap."""
        return super().has_joined() or not all(map(is_lazy, self.lazy))

    def used_too_early(self, divided: Container[str]) -> str | None:
        """The name of a parameter with a gradient that is neither known nor divided, if any."""
        if self.has_joined():
            known = set(self.trained.values())
            for name, p in self._model.named_parameters():
                is_new = p.requires_grad and not is_lazy(p) and p not in known
                if is_new and p.grad is not None and name not in divided:
                    return name
        return None

    def held(self, ids: set[int]) -> set[int]:
        """The ids among `ids` of the model's parameters, including frozen and new ones."""
        found = ids & self._ids
        if len(found) < len(ids) and self.has_joined():
            return ids & set(map(id, self._model.parameters()))
        return found


def left_out_of_shards(model: nn.Module) -> list[nn.Module]:
    """A single worker's experts that FSDP2 was told to ignore, with their submodules.

    Experts on several workers are divided modules.
    """
    alone = (m for m in model.modules() if isinstance(m, DividedModules) and m.comm.size == 1)
    return [
        m for each in alone if not any(map(is_dtensor, each.parameters())) for m in each.modules()
    ]


def _children(modules: Iterable[nn.Module]) -> Iterator[dict[str, Any]]:
    for module in modules:
        yield module._parameters
        yield module._modules
