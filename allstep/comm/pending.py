"""The result of a call that is still under way."""

from collections.abc import Callable
from typing import Generic, TypeVar

from allstep.errors import UsageError

__all__ = ["Pending"]

T = TypeVar("T")


class Pending(Generic[T]):
    """What an asynchronous verb returns; `wait` gives the verb's result.

    >>> Pending(lambda timeout_s: 3).wait()
    3
    """

    def __init__(self, finish: Callable[[float | None], T]) -> None:
        self._finish: Callable[[float | None], T] | None = finish
        self._result: T | None = None

    def wait(self, timeout_s: float | None = None) -> T:
        """Waits until the call has finished; may be asked again for the same result.

        Args:
            timeout_s: how long to wait at most; the communicator's `timeout_s` if None.

        Raises:
            CollectiveTimeoutError: if it took longer.
            PeerLostError: if another worker failed meanwhile.
        """
        if timeout_s is not None and not timeout_s > 0:
            raise UsageError(f"`timeout_s` (={timeout_s!r}) must be a positive number of seconds.")
        if self._finish is not None:
            self._result = self._finish(timeout_s)
            self._finish = None
        return self._result  # type: ignore[return-value]
