"""The runs of `allstep verify`: numbers of workers, or meshes of them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod

from allstep.cli.quantities import parse_counts, parse_named_counts
from allstep.cli.verify_runs import Start
from allstep.errors import UsageError

_WORKERS = "1,2"
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def read_starts(
    workers: str | None, meshes: Sequence[str], arguments: Sequence[str]
) -> Sequence[Start]:
    """The runs to compare; all are compared with the first.

    Args:
        workers: of `-n`; None if it was left out.
        meshes: of each `--mesh`.
        arguments: the script's own; in those of a mesh `{axis}` stands for an axis's length.
    """
    if meshes:
        return _read_meshes(workers, meshes, arguments)
    sizes = parse_counts("n", workers or _WORKERS)
    if len(sizes) < 2:
        raise UsageError(
            f"`n` (={workers}) must be two or more numbers of workers to compare, such as `-n 1,2`."
        )
    return [Start(size=size, arguments=tuple(arguments)) for size in sizes]


def _read_meshes(
    workers: str | None, meshes: Sequence[str], arguments: Sequence[str]
) -> Sequence[Start]:
    if workers is not None:
        raise UsageError(
            f"`n` (={workers}) goes without `mesh` (={meshes[0]}), whose axes multiply to the"
            " number of workers: leave one of them out."
        )
    if len(meshes) < 2:
        raise UsageError(
            f"`mesh` (={meshes[0]}) must be given twice or more, for what to compare, such as"
            " `--mesh data=2 --mesh tensor=2`."
        )
    read = [_read_axes(mesh) for mesh in meshes]
    names = dict.fromkeys(name for axes in read for name in axes)
    given = [{name: axes.get(name, 1) for name in names} for axes in read]
    starts = [
        Start(size=prod(axes.values()), arguments=_filled(arguments, axes), axes=axes)
        for axes in given
    ]
    _check_differing(starts, names)
    return starts


def _read_axes(text: str) -> dict[str, int]:
    names = [part.partition("=")[0].strip() for part in text.split(",")]
    if not all(part.isidentifier() for part in names) or "=" not in text:
        raise UsageError(
            f"`mesh` (={text}) must be lengths of axes by name, such as data=2,tensor=2."
        )
    return parse_named_counts("mesh", text, names)


def _filled(arguments: Sequence[str], axes: Mapping[str, int]) -> tuple[str, ...]:
    """>>> _filled(["--tensor", "{tensor}"], {"data": 1, "tensor": 2})
    ('--tensor', '2')
    """

    def length(found: re.Match[str]) -> str:
        if found[1] not in axes:
            raise UsageError(
                f"`{found[0]}` in the script's arguments is no axis of `--mesh`; they are"
                f" {', '.join(axes)}. Name it there, if only as {found[1]}=1."
            )
        return str(axes[found[1]])

    return tuple(_PLACEHOLDER.sub(length, argument) for argument in arguments)


def _check_differing(starts: Sequence[Start], names: Iterable[str]) -> None:
    """Raises UsageError for meshes between which a script can't distinguish."""
    seen: dict[tuple[int, Sequence[str]], Start] = {}
    for start in starts:
        earlier = seen.setdefault((start.size, start.arguments), start)
        if earlier is not start:
            flags = " ".join(f"--{name} {{{name}}}" for name in names)
            raise UsageError(
                f"`mesh` (={start}) would be the same command as {earlier}: {start.size} workers"
                " with the same arguments. Give the script its axes' lengths by flags of its own,"
                f" such as `-- {flags}`."
            )
