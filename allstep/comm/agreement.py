"""Checks that all workers want the same, by comparing one digest in one message.

Workers that make different calls get an error that names the calls. Without it they would wait for
each other, or mistake one tensor for another.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any

from allstep.comm.codec import decode, encode
from allstep.comm.group import MessageGroup
from allstep.comm.missing import listed
from allstep.errors import DisagreementError, UsageError

Details = Sequence[tuple[Any, ...]]
"""A name and its properties, as often as needed, such as those of a model's tensors."""

_CURE = "Make the same calls with the same arguments in the same order on all workers."
_DIGEST_BYTES = 8
_MOST = 5  # largest number of differences that an error names


def digest(value: object) -> int:
    """A digest of plain data: a number below 2^62, the same in every process."""
    return int.from_bytes(digest_bytes(value), "big") >> 2


def digest_bytes(value: object) -> bytes:
    """A digest of plain data: a few bytes, the same in every process."""
    return blake2b(repr(value).encode(), digest_size=_DIGEST_BYTES).digest()


def agree(
    group: MessageGroup,
    action: str,
    details: Details = (),
    *,
    fault: str | None = None,
    details_digest: int | None = None,
    told: bytes = b"",
    cure: str = _CURE,
    verb: str = "agree",
) -> list[bytes]:
    """Lets either all workers go on, or none. Collective.

    Workers first exchange digests of a fixed size; the details follow only if the digests differ.

    Args:
        group: the workers.
        action: what this worker wants to do, in words.
        details: what it wants to do it with.
        fault: why this worker cannot do it; None if it can.
        details_digest: digest of `details`, if it is already known.
        told: further bytes for the others, in the same message; they may differ between workers.
        cure: end of the error's message, which says what to do.
        verb: name of the comparing call, for the errors of workers that make another call.

    Returns:
        `told` of each worker, by rank.

    Raises:
        DisagreementError: on every worker without a fault, if actions, faults or details differ;
            names the difference and the ranks.
        UsageError: on workers with a fault; the message is `fault`.
    """
    bodies = [told]
    if group.size > 1:
        known = digest(details) if details_digest is None else details_digest
        compared = digest_bytes((action, fault)) + known.to_bytes(_DIGEST_BYTES, "big")
        bodies = group.messages.all_gather(compared + told, verb, compares=True)
        if not all(body.startswith(compared) for body in bodies):
            words = explain(group, action, details, fault=fault, cure=cure, verb=verb)
            if fault is None:
                error = DisagreementError(words)
                error.matches_rank_0 = bodies[0].startswith(compared)
                raise error
        bodies = [body[len(compared) :] for body in bodies]
    if fault is not None:
        raise UsageError(fault)
    return bodies


def explain(
    group: MessageGroup,
    action: str,
    details: Details = (),
    *,
    fault: str | None = None,
    cure: str = _CURE,
    verb: str = "agree",
) -> str:
    """Which workers want what, once their digests are known to differ. Collective; see `agree`."""
    own = encode((action, fault, [list(map(str, entry)) for entry in details]))
    found = [decode(body) for body in group.messages.all_gather(own, verb, compares=True)]
    numbers = group.wire.names.numbers
    wishes = [f"want: {do}" if fault is None else f"cannot: {fault}" for do, fault, _ in found]
    if len(set(wishes)) > 1:
        who = "; ".join(f"{ranks} {wish}" for wish, ranks in _ranks_by(wishes, numbers).items())
        who = re.sub(r"(rank \d+) want:", r"\1 wants:", who)
        return f"Workers came for different things: {who}. {cure}"
    tables = [{name: " ".join(rest) for name, *rest in entries} for _, _, entries in found]
    differences = "; ".join(islice(_differences(tables, numbers), _MOST)) or "their order differs"
    return f"Workers that {action} disagree: {differences}. {cure}"


def _differences(tables: Sequence[Mapping[str, str]], numbers: Sequence[int]) -> Iterator[str]:
    """A description of each name whose value differs between the ranks' tables.

    >>> list(_differences([{"a": "[2]"}, {"a": "[3]"}, {"a": "[2]"}], range(3)))
    ['`a` is [2] on ranks 0, 2; [3] on rank 1']
    """
    for name in dict.fromkeys(name for table in tables for name in table):
        values = [table.get(name, "missing") for table in tables]
        if len(set(values)) > 1:
            by_value = _ranks_by(values, numbers).items()
            yield f"`{name}` is " + "; ".join(f"{value} on {ranks}" for value, ranks in by_value)


def _ranks_by(values: Sequence[str], numbers: Sequence[int]) -> dict[str, str]:
    """>>> _ranks_by(["x", "y", "x"], range(3))
    {'x': 'ranks 0, 2', 'y': 'rank 1'}
    """
    return {
        value: listed([number for number, v in zip(numbers, values, strict=True) if v == value])
        for value in dict.fromkeys(values)
    }
