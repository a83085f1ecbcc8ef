"""Makes sure that all workers want the same: one digest, and one comparison by a message.

Workers that come for different things get an error that names them. Without it they would wait
for each other, or take one tensor for another.
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
_MOST = 5  # differences that an error names


def digest(value: object) -> int:
    """A number below 2^62, the same in every process, that stands for plain data."""
    return int.from_bytes(digest_bytes(value), "big") >> 2


def digest_bytes(value: object) -> bytes:
    """A few bytes, the same in every process, that stand for plain data."""
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
    """Lets all workers go on, or none. Collective.

    Digests of one size go ahead, whatever is compared; only where they differ, all say more.

    Args:
        group: the workers.
        action: what this worker wants to do, in words.
        details: what it wants to do it with.
        fault: why this worker cannot do it.
        details_digest: the digest of `details`, where it is known.
        told: what this worker tells the others besides, in the same message; may differ.
        cure: ends the error's message.
        verb: the communicator's verb that compares, for errors where others call another one.

    Returns:
        What each worker told, by rank.

    Raises:
        DisagreementError: on every worker without a fault, if action or details differ; names the
            difference and the ranks.
        UsageError: with `fault`.
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
    """Who wants what, once it is known that the workers differ. Collective; see `agree`."""
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
    """Words for each name whose value isn't the same in the tables of all ranks.

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
