"""Workers make sure that they came for the same thing before they exchange it."""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from allstep.comm import Communicator
from allstep.errors import DisagreementError
from allstep.exchange.parameters import Signature, signature

__all__ = ["agree", "check_same_arguments", "check_same_tensors", "digest", "explain"]


def digest(value: object) -> int:
    """A number below 2^62, the same in every process, that stands for plain data."""
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=8).digest(), "big") >> 2


def agree(
    comm: Communicator, action: str, agreed: int, described: Signature, *, optional: int = 0
) -> bool:
    """Checks with one small all-reduce that all workers came for the same action. Collective.

    Every collective of an exchange starts with this one, which has the same form whatever
    follows. Workers that come for different things therefore get an error, and don't wait
    for each other or take one tensor for another.

    Args:
        comm: the workers.
        action: what this worker wants to do, in words.
        agreed: the digest of `described`.
        described: the tensors to do it with.
        optional: a number that workers may differ in.

    Returns:
        Whether `optional` is the same on all workers.

    Raises:
        DisagreementError: if `action` or `agreed` differ; names the first difference and the ranks.
    """
    mine = [digest(action), agreed, optional]
    extremes = torch.tensor([*mine, *(-x for x in mine)], device=comm.device)
    largest = comm.all_reduce(extremes, "max").tolist()
    same = [high == -low for high, low in zip(largest[:3], largest[3:], strict=True)]
    if not (same[0] and same[1]):
        raise DisagreementError(explain(comm, action, described))
    return bool(same[2])


def explain(comm: Communicator, action: str, described: Signature) -> str:
    """Who wants what. Collective."""
    gathered = comm.all_gather_object((action, [list(map(str, entry)) for entry in described]))
    actions = [entry[0] for entry in gathered]
    if len(set(actions)) > 1:
        wanted = "; ".join(f"{_ranks(actions, a)}: {a}" for a in dict.fromkeys(actions))
        return (
            f"Workers came for different things. {wanted}. Every worker must change its model"
            " alike and make the same calls in the same order."
        )
    difference = first_difference([[tuple(t) for t in entry[1]] for entry in gathered])
    return (
        f"Workers disagree on the tensors of: {action}. {difference}."
        " Build and change the model in the same way on every worker."
    )


def check_same_arguments(comm: Communicator, arguments: Mapping[str, str]) -> None:
    """Checks that all workers were given the same. Collective.

    Args:
        comm: the workers.
        arguments: name -> value in words, of equal names on every worker.

    Raises:
        DisagreementError: names the arguments that differ, their values and the ranks.
    """
    mine = digest(sorted(arguments.items()))
    if not agree(comm, "attach a model", 0, (), optional=mine):
        found = "; ".join(_differences(comm.all_gather_object(dict(arguments))))
        raise DisagreementError(
            f"Workers were given different policies: {found}. Pass the same on every worker."
        )


def check_same_tensors(comm: Communicator, tensors: dict[str, Tensor]) -> None:
    """Checks that all workers have the same tensors, but for their values. Collective.

    Names, shapes, dtypes, the order in memory and whether parameters are frozen; see `signature`.

    Raises:
        DisagreementError: names the first tensor that differs and the ranks.
    """
    described = signature(tensors)
    agree(comm, "attach a model", digest(described), described)


def first_difference(described: Sequence[Sequence[tuple[str, ...]]]) -> str:
    """Words for the first tensor that the ranks don't have alike.

    >>> first_difference([[("a", "(2,)", "f32")], [("a", "(3,)", "f32")], [("a", "(2,)", "f32")]])
    '`a` is (2,) f32 on ranks 0, 2; (3,) f32 on rank 1'
    """
    tables = [{name: f"{shape} {dtype}" for name, shape, dtype in entries} for entries in described]
    return next(_differences(tables), "Their order differs")


def _differences(tables: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Words for each name whose value isn't the same in the tables of all ranks."""
    for name in dict.fromkeys(name for table in tables for name in table):
        values = [table.get(name, "missing") for table in tables]
        if len(set(values)) > 1:
            yield f"`{name}` is " + "; ".join(
                f"{value} on {_ranks(values, value)}" for value in dict.fromkeys(values)
            )


def _ranks(values: Sequence[str], value: str) -> str:
    """>>> _ranks(["x", "y", "x"], "x")
    'ranks 0, 2'
    """
    ranks = [str(rank) for rank, v in enumerate(values) if v == value]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
