"""Flags from the fields of a dataclass; an error is one line that names the flag."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import fields, is_dataclass
from io import StringIO
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import OmitArgPrefixes

from allstep.errors import UsageError, nearest_names

_Read = TypeVar("_Read")
_NUMBERS: dict[Any, tuple[str, str]] = {int: ("a whole number", "2"), float: ("a number", "0.1")}


def read_flags(
    kind: type[_Read],
    flags: Sequence[str],
    *,
    prog: str,
    description: str,
    default: _Read | None = None,
) -> _Read:
    """A dataclass with fields from flags; `--help` prints the flags and ends the process.

    Args:
        kind: the dataclass; fields that are dataclasses themselves become flags, too.
        flags: such as `--epochs 3`.
        prog, description: for `--help`.
        default: what is used where a flag is missing.

    Raises:
        UsageError: if a flag doesn't exist, or its value is none for it.
    """
    if not {"-h", "--help"} & set(flags):
        _check(flags, _hints(kind), prog)
    given: dict[str, Any] = {} if default is None else {"default": default}
    read: Any = tyro.cli
    told = StringIO()
    try:
        with redirect_stderr(told):
            found: _Read = read(
                kind,
                args=flags,
                prog=prog,
                description=description,
                config=(OmitArgPrefixes,),
                **given,
            )
    except SystemExit as end:  # behind a frame, of which a dataclass's own error needs none
        own = _usage_error_behind(end)
        if own is not None:
            raise own from None
        print(told.getvalue(), end="", file=sys.stderr)
        raise
    return found


def _usage_error_behind(error: BaseException | None) -> UsageError | None:
    while error is not None and not isinstance(error, UsageError):
        error = error.__context__
    return error


def _hints(kind: Any) -> dict[str, Any]:
    """Field name -> type hint, including the fields of nested dataclasses."""
    hints = get_type_hints(kind)
    found: dict[str, Any] = {}
    for field in fields(kind):
        hint = hints[field.name]
        found |= _hints(hint) if is_dataclass(hint) else {field.name: hint}
    return found


def _check(flags: Sequence[str], hints: Mapping[str, Any], prog: str) -> None:
    words = list(flags)
    while words:
        flag, has_value, value = words.pop(0).partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if name.removeprefix("no_") in hints and bool in _kinds(hints[name.removeprefix("no_")]):
            if has_value:
                raise UsageError(f"`{flag}` (={value}) takes no value; `--no-...` is its opposite.")
            continue
        if not flag.startswith("--") or name not in hints:
            names = [f"--{name.replace('_', '-')}" for name in hints]
            raise UsageError(f"`{flag}` is no flag of `{prog}`; {nearest_names(flag, names)}")
        if not has_value:
            if not words:
                raise UsageError(f"`{flag}` needs a value: `{flag} {name.upper()}`.")
            value = words.pop(0)
        _check_value(flag, name, value, _kinds(hints[name]))


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The types that a type hint allows."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _check_value(flag: str, name: str, value: str, kinds: Sequence[Any]) -> None:
    if value == "None" and NoneType in kinds:
        return
    allowed = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if allowed and value not in map(str, allowed):
        raise UsageError(f"`{name}` (={value}): {nearest_names(value, map(str, allowed))}")
    wanted = [kind for kind in kinds if kind is not NoneType]
    if len(wanted) != 1 or wanted[0] not in _NUMBERS:
        return
    try:
        wanted[0](value)
    except ValueError:
        what, example = _NUMBERS[wanted[0]]
        raise UsageError(
            f"`{name}` (={value}) must be {what}, such as `{flag} {example}`."
        ) from None
