"""Calls that a worker announces, so that workers that wait for it elsewhere learn of them early.

[Note: announced calls] A worker that saves a checkpoint waits for the others in that call. If these
go on to their next exchange instead, they wait in another group, no message says so, and all
workers wait until the timeout. So before such a call, which is rare, a worker writes to the group's
store which call it makes and how many exchanges it has begun. A worker that has waited a second for
an exchange reads this entry. If another worker waits in a call that this one has not made, and has
not begun the exchange that this one waits for, neither wait can ever end. This covers calls and
exchanges of the thread that made the communicator; other threads are ignored.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from allstep.comm.wire import Wire
from allstep.comm.work import Work, answer_of_store
from allstep.errors import CollectiveTimeoutError, CommunicationError, DisagreementError

_LOOK_S = 1.0
_CALL, _CONFLICT = "allstep/announced/call", "allstep/announced/conflict"
_CURE = "Make the same calls in the same order on all workers, not on one of them."


class AnnouncedCalls:
    """One worker's record of the announced calls and the exchanges of a group.

    Args:
        wire: the group's wire.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._store = None if wire.group is None else wire.group.get_group_store()
        self._number = wire.names.number
        self._home = threading.get_ident()
        self._num_calls = self._num_exchanges = 0

    @contextmanager
    def call(self, action: str) -> Iterator[None]:
        """A context around a call that needs all workers; announces it to them.

        Raises:
            DisagreementError: if another worker has found that it waits elsewhere.
        """
        if not self._is_home:
            yield
            return
        self._num_calls += 1
        self._write(_CALL, [self._number, self._num_calls, self._num_exchanges, action])
        try:
            yield
        except CommunicationError as error:
            found = self._read(_CONFLICT)
            if found is not None and found[0] == self._num_calls:
                raise DisagreementError(found[1]) from error
            raise

    def begin_exchange(self) -> int:
        """Counts an exchange that this worker begins; returns the exchange's number."""
        self._num_exchanges += self._is_home
        return self._num_exchanges

    def wait(self, work: Work[Any], exchange: int, action: str, abort: Callable[[], None]) -> None:
        """Waits for an exchange, unless another worker can never begin it.

        Args:
            work: the exchange's Work.
            exchange: the exchange's number.
            action: what this worker wants to do, in words.
            abort: function that aborts the group, so that the others fail too.

        Raises:
            DisagreementError: if another worker waits in a call that this one has not made.
            PeerLostError: if another worker's connection is closed. [Note: missed ends]
        """
        with self._wire.names.activity.call("exchange"):
            self._wait(work, exchange, action, abort)

    def _wait(self, work: Work[Any], exchange: int, action: str, abort: Callable[[], None]) -> None:
        if self._store is None:
            work.wait()
            return
        while True:
            try:
                work.wait(_LOOK_S)
                return
            except CommunicationError as error:
                words = self._find_conflict(exchange, action)
                if words is not None:
                    abort()
                    raise DisagreementError(words) from error
                if not isinstance(error, CollectiveTimeoutError):
                    raise
                if work.is_completed():  # failed after the group's own timeout
                    work.wait()
                    return
            self._wire.check("exchange")

    @property
    def _is_home(self) -> bool:
        return threading.get_ident() == self._home

    def _find_conflict(self, exchange: int, action: str) -> str | None:
        announced = self._read(_CALL) if self._is_home else None
        if announced is None:
            return None
        number, call, num_exchanges, wanted = announced
        if number == self._number or call <= self._num_calls or num_exchanges >= exchange:
            return None
        words = (
            f"Workers came for different things: rank {number} wants: {wanted};"
            f" rank {self._number} wants: {action}. {_CURE}"
        )
        self._write(_CONFLICT, [call, words])
        return words

    def _write(self, key: str, content: list[Any]) -> None:
        store = self._store
        if store is not None:
            answer_of_store(lambda: store.set(key, json.dumps(content)))

    def _read(self, key: str) -> Any:
        store = self._store
        if store is None:
            return None
        return answer_of_store(lambda: json.loads(store.get(key)) if store.check([key]) else None)
