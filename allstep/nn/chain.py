"""Modules on several ranks, and the values that go from one to the next, with gradients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

import torch
from torch import Tensor, nn

from allstep.comm import Communicator, Mesh, StageModules
from allstep.comm.agreement import agree
from allstep.comm.autograd import recv, send
from allstep.device import drawn_seed, preserved_random_state
from allstep.device import seed as seed_torch
from allstep.errors import UsageError, check_type
from allstep.nn.replicated import seed_at

Value = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class ChainPart:
    """A module of a `Chain`, and where it runs.

    Attributes:
        name: of the part; its parameters' names begin with it.
        module: the module, or what makes it, which is called on its rank only, under a random
            state of the part: with equal seeds before, initial values are the same on any rank.
        rank: which worker has it.
        inputs: names of the values that it is called with, in this order.
        outputs: names of what it returns: a value, or a tuple of as many. A value is a tensor or a
            tuple of tensors, such as an LSTM's state.
    """

    name: str
    module: nn.Module | Callable[[], nn.Module]
    rank: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draws inside are those of the seed; afterwards torch's random state is what it was."""
    with preserved_random_state(device):
        seed_torch(seed, device)
        yield


def fault_of_modules(
    kind: str, modules: Mapping[str, object], ranks: Mapping[str, int] | None = None
) -> str | None:
    """Why they are no parts of a model: no modules, or each copy of what they share would part.

    Args:
        kind: what a part is called.
        modules: which part -> its module.
        ranks: which part -> the only rank that it is ever on, whose parts may share; None where
            that is not known.

    >>> tied = nn.Linear(2, 2)
    >>> fault_of_modules("stage", {"0": tied, "1": nn.Sequential(tied)})
    '`stages`: `0.weight` of stage 1 is also a parameter of stage 0; give each its own, or put ...'
    """
    owners: dict[nn.Parameter, str] = {}
    for which, module in modules.items():
        if not isinstance(module, nn.Module):  # whatever the function's types say
            return f"`{kind}s`: what makes {kind} {which} returned {module!r}; return a module."
        for name, p in module.named_parameters():
            owner = owners.setdefault(p, which)
            if owner != which and (ranks is None or ranks[owner] != ranks[which]):
                return (
                    f"`{kind}s`: `{name}` of {kind} {which} is also a parameter of {kind}"
                    f" {owner}; give each its own, or put what shares it in one {kind}."
                )
    return None


class Chain(nn.Module):
    """A model whose modules lie on several workers, joined in any graph without circles.

    All workers make it of the same parts and call it together. Values that are taken on another
    rank than they are made on are sent there, once, and their gradients come back.
    A part's random numbers, such as dropout's, are those of the call and the part, wherever it
    is: with equal random states, as `steps` sets them, any placement draws the same.
    Attach the chain along another axis, `attach(model, mesh["data"])`: all workers of a chain get
    the same micro-batches.

    Args:
        parts: the modules, the same on all workers.
        mesh: the workers.
        inputs: names of what the call is given.
        outputs: names of what it returns.
        axis: of the mesh, along which the parts lie.
        seeded: sets the random state in which a part is made, or called: (seed, device) -> context.

    Attributes:
        parts: this worker's modules by name.

    Raises:
        UsageError: before anything runs, if parts wait for each other in a circle, if a value is
            taken and never made, made twice, or made and never taken, if there is no such rank, or
            if parts on different ranks share a parameter.
        DisagreementError: if workers describe other parts.

    Example:
        >>> parts = [
        ...     ChainPart("encoder", lambda: nn.Linear(3, 2), 0, ("x",), ("hidden",)),
        ...     ChainPart("decoder", lambda: nn.Linear(2, 3), 0, ("hidden",), ("y",)),
        ... ]
        >>> mesh = Communicator.single_process().mesh(data=1, model=1)
        >>> chain = Chain(parts, mesh, inputs=("x",), outputs=("y",))
        >>> values, delegate = chain(x=torch.ones(5, 3))
        >>> loss = values["y"].square().mean() if "y" in values else 0
        >>> (loss + delegate).backward()
    """

    def __init__(
        self,
        parts: Sequence[ChainPart],
        mesh: Mesh[Communicator],
        *,
        inputs: Sequence[str],
        outputs: Sequence[str],
        axis: str = "model",
        seeded: Callable[[int, torch.device], AbstractContextManager[None]] = seeded,
    ) -> None:
        super().__init__()
        check_type("mesh", mesh, Mesh, "`comm.mesh(data=1, model=comm.size)`, say")
        self._comm = comm = mesh[axis]
        details: list[tuple[Any, ...]] = [
            (part.name, part.rank, part.inputs, part.outputs) for part in parts
        ]
        details.append(("the chain", tuple(inputs), tuple(outputs)))
        given = {f"`{p.name}`": p.module for p in parts if isinstance(p.module, nn.Module)}
        ranks = {f"`{p.name}`": p.rank for p in parts}
        fault = _fault(parts, inputs, outputs, comm.size) or fault_of_modules("part", given, ranks)
        agree(comm, "make a Chain", details, fault=fault)
        self._order = _in_order(parts, inputs)
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)
        self._rank_of = {name: part.rank for part in parts for name in part.outputs}
        self._seeded = seeded
        self.parts = StageModules(mesh, axis, [part.name for part in parts])
        seed, made = drawn_seed(), {}
        for part in (part for part in parts if part.rank == comm.rank):
            module = part.module
            with seeded(seed_at(seed, part.name), comm.device):
                made[part.name] = module if isinstance(module, nn.Module) else module()
        others = {f"`{n}`": module for n, module in made.items() if f"`{n}`" not in given}
        fault = fault_of_modules("part", others)
        agree(comm, "make a Chain of these parts", fault=fault)
        self.parts.update(made)

    def forward(self, **values: Value) -> tuple[dict[str, Any], Tensor]:
        """Runs this worker's parts; all workers call it.

        Args:
            values: the chain's inputs that parts on this rank take; others are left alone.

        Returns:
            The chain's outputs that are made on this rank, by name, and a delegate: a zero to add
            to the loss, or to call `backward` on where there is none, on every rank.

        Raises:
            UsageError: if an input that a part here takes is not given, or a part returns
                another number of values than it has outputs.
        """
        comm = self._comm
        own = [part for part in self._order if part.rank == comm.rank]
        for name in {name for part in own for name in part.inputs if name in self._inputs}:
            if name not in values:
                raise UsageError(f"`{name}` is not given, and a part on rank {comm.rank} takes it.")
        held: dict[str, Any] = dict(values)
        delegate = torch.zeros((), device=comm.device, requires_grad=torch.is_grad_enabled())
        seed = drawn_seed()
        sent: set[tuple[str, int]] = set()
        for part in self._order:
            # [Note: one order of all messages] Every rank goes through all parts and messages in
            # the same order and takes its own: none waits for one that waits for it.
            for name in part.inputs:
                source = self._rank_of.get(name, part.rank)
                if source == part.rank or (name, part.rank) in sent:
                    continue
                sent.add((name, part.rank))
                if comm.rank == source:
                    delegate = delegate + send(comm, held[name], part.rank)
                elif comm.rank == part.rank:
                    held[name] = recv(comm, source)
                    delegate = delegate + _zero_of(held[name], delegate)
            if part.rank == comm.rank:
                with self._seeded(seed_at(seed, part.name), comm.device):
                    found = self.parts[part.name](*(held[name] for name in part.inputs))
                held.update(_named(part, found))
        here = [name for name in self._outputs if self._rank_of[name] == comm.rank]
        return {name: held[name] for name in here}, delegate


def _zero_of(value: Value, like: Tensor) -> Tensor:
    """A zero through which backward reaches what was received, used or not."""
    tensors = (value,) if isinstance(value, Tensor) else value
    zeros = [t.reshape(-1)[:0].sum().to(like) for t in tensors if t.requires_grad]
    return sum(zeros, torch.zeros_like(like))


def _named(part: ChainPart, found: Any) -> dict[str, Any]:
    if len(part.outputs) == 1:
        return {part.outputs[0]: found}
    if not isinstance(found, tuple) or len(found) != len(part.outputs):
        got = f"{len(found)} values" if isinstance(found, tuple) else f"a {type(found).__name__}"
        raise UsageError(f"Part `{part.name}` returned {got}; it has outputs {part.outputs}.")
    return dict(zip(part.outputs, found, strict=True))


def _in_order(parts: Sequence[ChainPart], inputs: Sequence[str]) -> list[ChainPart]:
    """Each part after those whose outputs it takes."""
    order: list[ChainPart] = []
    there, left = set(inputs), list(parts)
    while ready := next((part for part in left if there.issuperset(part.inputs)), None):
        order.append(ready)
        left.remove(ready)
        there.update(ready.outputs)
    return order


def _fault(
    parts: Sequence[ChainPart], inputs: Sequence[str], outputs: Sequence[str], size: int
) -> str | None:
    """What is wrong with the graph, in words."""
    names = [part.name for part in parts]
    for part in parts:
        if names.count(part.name) > 1 or not part.name or "." in part.name:
            return f"`parts` has the name {part.name!r}; pass names that differ, without dots."
        if part.rank not in range(size):
            return f"Part `{part.name}` is on rank {part.rank}; choose one of 0 to {size - 1}."
    made = [*inputs, *(name for part in parts for name in part.outputs)]
    taken = [*outputs, *(name for part in parts for name in part.inputs)]
    for name in made:
        if made.count(name) > 1:
            return f"Value `{name}` is made twice; give each a name of its own."
        if name not in taken:
            return f"Value `{name}` is made and never taken; name it in `outputs` or leave it out."
    for name in taken:
        if name not in made:
            return f"Value `{name}` is taken and never made; name it in `inputs` or make it."
    passed_on = set(inputs) & set(outputs)
    if passed_on:
        return f"Value `{min(passed_on)}` is an input and an output; no part makes it."
    maker = {name: part.name for part in parts for name in part.outputs}
    waits_for = {part.name: [maker[n] for n in part.inputs if n in maker] for part in parts}
    try:
        TopologicalSorter(waits_for).prepare()
    except CycleError as error:
        circle = " -> ".join(f"`{name}`" for name in error.args[1])
        return f"Parts wait for each other in a circle: {circle}."
    return None
