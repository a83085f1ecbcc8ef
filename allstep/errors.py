"""Typed errors; every message names the argument, its value and what to do."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral, Number, Real

__all__ = [
    "AllstepError",
    "CheckpointError",
    "CollectiveTimeoutError",
    "CommunicationError",
    "DataError",
    "DisagreementError",
    "PeerLostError",
    "UsageError",
    "check_choice",
    "check_integer",
    "check_multiple",
    "check_not_negative",
    "check_positive",
    "check_share",
    "check_type",
    "named_part",
    "nearest_multiples",
    "nearest_names",
]


class AllstepError(Exception):
    """Base of all errors that allstep raises on purpose."""


class UsageError(AllstepError, ValueError):
    """An argument is wrong; the message names it, its value and what to do."""


class DataError(AllstepError, RuntimeError):
    """A sample or a file of the data set cannot be read."""


class CheckpointError(AllstepError, RuntimeError):
    """A checkpoint is damaged or does not fit the model."""


class CommunicationError(AllstepError, RuntimeError):
    """Workers could not exchange messages or tensors.

    A note at its end says where to find causes and remedies.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.add_note("Causes and cures: allstep why RUN, or allstep why MESSAGE.")


class PeerLostError(CommunicationError):
    """Another worker closed its connection: it failed or was stopped."""


class CollectiveTimeoutError(CommunicationError):
    """A collective did not finish within `timeout_s`."""


class DisagreementError(CommunicationError):
    """Workers passed tensors, names or keys that do not match.

    Attributes:
        matches_rank_0: whether this worker's are known to match those of rank 0.
    """

    matches_rank_0 = False


def check_choice(name: str, value: object, valid: Iterable[str]) -> None:
    """Refuses a value that is not among the valid names.

    Raises:
        UsageError: naming the argument, with the closest valid names, or all of them.

    >>> check_choice("op", "max", ["sum", "max"])
    >>> check_choice("op", "sun", ["sum", "max"])
    Traceback (most recent call last):
    allstep.errors.UsageError: `op` (='sun'): did you mean `sum`?
    """
    names = list(valid)
    if value not in names:
        raise UsageError(f"`{name}` (={value!r}): {nearest_names(str(value), names)}")


def check_integer(name: str, value: object, minimum: int = 1, cure: str = "") -> None:
    """Refuses a value that is not a whole number, or is below `minimum`.

    Args:
        name: name of the argument.
        value: value of the argument; it may be of any type.
        minimum: the smallest allowed value.
        cure: end of the message that says what to do; empty if there is nothing to add.

    Raises:
        UsageError: naming the argument.

    >>> check_integer("epochs", 3)
    >>> check_integer("keep", 0, cure="2 or more is safer")
    Traceback (most recent call last):
    allstep.errors.UsageError: `keep` (=0) must be at least 1; 2 or more is safer.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UsageError(f"`{name}` (={value!r}) must be a whole number.")
    if value < minimum:
        end = f"; {cure}" if cure else ""
        raise UsageError(f"`{name}` (={value}) must be at least {minimum}{end}.")


def check_type(name: str, value: object, kind: type, cure: str) -> None:
    """Refuses a value of another class.

    Args:
        name: name of the argument.
        value: value of the argument; it may be of any type.
        kind: the class that it must have.
        cure: what to pass instead.

    Raises:
        UsageError: naming the argument.

    >>> check_type("name", 3, str, "that of an axis")
    Traceback (most recent call last):
    allstep.errors.UsageError: `name` (=3) must be a str: that of an axis.
    """
    if not isinstance(value, kind):
        is_plain = value is None or isinstance(value, str | Number | tuple | list)
        shown = f"={value!r}" if is_plain else f"a {type(value).__name__}"
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise UsageError(f"`{name}` ({shown}) must be {article} {kind.__name__}: {cure}.")


def named_part(name: str) -> str:
    """A module of the user's model, as messages call it.

    >>> named_part("0"), named_part("")
    ('`model.0`', '`model`')
    """
    return f"`model.{name}`" if name else "`model`"


def nearest_names(name: str, valid: Iterable[str]) -> str:
    """What to say of an unknown name: the closest valid names, or all of them.

    >>> nearest_names("digit", ["digits", "fashion"])
    'did you mean `digits`?'
    >>> nearest_names("xyz", ["digits", "fashion"])
    'valid: `digits`, `fashion`.'
    """
    names = list(valid)
    close = get_close_matches(name, names)
    listed = ", ".join(f"`{n}`" for n in close or names)
    return f"did you mean {listed}?" if close else f"valid: {listed}."


def nearest_multiples(value: int, unit: int) -> str:
    """The multiples of `unit` next to `value`, for messages.

    >>> nearest_multiples(1000, 48)
    '960, 1008'
    >>> nearest_multiples(5, 48)
    '48'
    """
    below = value // unit * unit
    return f"{below}, {below + unit}" if below else str(unit)


def check_multiple(name: str, value: int, unit_name: str, unit: int) -> None:
    """Refuses a value that is not a multiple of `unit`, the value of the argument `unit_name`."""
    if value % unit:
        raise UsageError(
            f"`{name}` (={value}) must be a multiple of `{unit_name}` (={unit}); nearest:"
            f" {nearest_multiples(value, unit)}."
        )


def first_few(found: Sequence[object], most: int) -> str:
    """A list for a message, which says how many more there are.

    >>> first_few(["a", "b", "c"], 2), first_few(["a", "b"], 2)
    ('a, b and 1 more', 'a, b')
    """
    num_more = len(found) - most
    return ", ".join(map(str, found[:most])) + (f" and {num_more} more" if num_more > 0 else "")


def check_positive(name: str, value: float, example: str) -> None:
    """Refuses zero, negative and infinite values, NaN and whatever is not a number."""
    if not _is_number(value) or not 0 < value < math.inf:
        raise UsageError(f"`{name}` (={value!r}) must be above 0 and finite; {example}.")


def check_not_negative(name: str, value: float, example: str) -> None:
    """Refuses negative and infinite values, NaN and whatever is not a number."""
    if not _is_number(value) or not 0 <= value < math.inf:
        raise UsageError(f"`{name}` (={value!r}) must be 0 or more, and finite; {example}.")


def check_share(name: str, value: float, limits: str = "[0, 1]", cure: str = "") -> None:
    """Refuses values outside an interval from 0 to 1, NaN and whatever is not a number.

    Args:
        name: name of the argument.
        value: value of the argument; it may be of any type.
        limits: the interval, where a round bracket excludes that end: "[0, 1]", "[0, 1)", "(0, 1]",
            "(0, 1)".
        cure: end of the message that says what to do; empty if there is nothing to add.

    >>> check_share("momentum", 1.0, "[0, 1)", "0.9 is usual")
    Traceback (most recent call last):
    allstep.errors.UsageError: `momentum` (=1.0) must be at least 0 and below 1; 0.9 is usual.
    """
    words, is_inside = _LIMITS[limits]
    if not _is_number(value) or not is_inside(value):
        end = f"; {cure}" if cure else ""
        raise UsageError(f"`{name}` (={value}) must be {words}{end}.")


_LIMITS: Mapping[str, tuple[str, Callable[[float], bool]]] = {
    "[0, 1]": ("0 to 1", lambda value: 0 <= value <= 1),
    "[0, 1)": ("at least 0 and below 1", lambda value: 0 <= value < 1),
    "(0, 1]": ("above 0 and at most 1", lambda value: 0 < value <= 1),
    "(0, 1)": ("between 0 and 1", lambda value: 0 < value < 1),
}


def _is_number(value: object) -> bool:
    """Whether a value is a number and not a bool; one read from a file may be of any type."""
    return isinstance(value, Real) and not isinstance(value, bool)
