"""What is said of a call that failed, where the backend says only that time ran out."""

import gc
import subprocess
import sys
import weakref
from contextlib import suppress
from dataclasses import replace

import pytest
from torch._C._distributed_c10d import HashStore

from allstep.comm.failures import explained
from allstep.comm.missing import RankNames
from allstep.comm.places import Place
from allstep.errors import CollectiveTimeoutError, CommunicationError, PeerLostError


def lost_pid() -> int:
    """Of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("is_known", [True, False])
def test_a_call_that_timed_out_says_which_process_has_ended(is_known: bool) -> None:
    """Where that is known, which it is not of another host's."""
    own = Place.own()
    gone = replace(own, pid=lost_pid(), space=own.space if is_known else "another")
    names = RankNames(range(2), 0, 2, HashStore(), [own, gone])
    with pytest.raises(CommunicationError) as caught, explained("all_reduce", names, 0.5):
        raise RuntimeError("Timed out waiting 500ms for recv operation to complete")
    assert isinstance(caught.value, PeerLostError) == is_known
    message = str(caught.value)
    assert (f"rank 1 ({gone}) has ended" in message) == is_known
    assert ("missing: rank 1." in message) != is_known


def who_closed(names: RankNames) -> str:
    with pytest.raises(PeerLostError) as caught, explained("all_reduce", names, 0.5):
        raise RuntimeError("Connection closed by peer")
    return str(caught.value)


class LostStore(HashStore):
    """One whose server is gone."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Connection reset by peer")


def test_a_lost_process_is_named_where_no_store_answers() -> None:
    own, gone = Place.own(), replace(Place.own(), pid=lost_pid())
    names = RankNames(range(3), 0, 3, LostStore(), [own, gone, own])
    assert f"of 3: rank 1 ({gone}) closed its connection" in who_closed(names)


class AskedStore(HashStore):
    """Remembers whether anybody asked."""

    is_asked = False

    def check(self, keys: list[str]) -> bool:
        self.is_asked = True
        return super().check(keys)


def test_a_process_that_ends_as_another_is_lost_is_not_named() -> None:
    """Nor where its report doesn't come in time, as on a busy machine."""
    own, lost, next_one = (replace(Place.own(), pid=pid) for pid in (1, 2, 3))
    store, places = AskedStore(), [own, lost, next_one]

    def has_ended(place: Place) -> bool:
        return place is lost or (place is next_one and store.is_asked)

    names = RankNames(range(3), 0, 3, store, places, has_ended=has_ended)
    assert f"of 3: rank 1 ({lost}) closed its connection" in who_closed(names)


def test_a_process_that_ended_with_a_report_is_not_named() -> None:
    own, elsewhere = Place.own(), replace(Place.own(), space="another")
    gone = replace(own, pid=lost_pid())
    store, places = HashStore(), [own, elsewhere, gone]
    RankNames(range(3), 2, 3, store, places).report_stuck("all_reduce")
    names = RankNames(range(3), 0, 3, store, places)
    assert f"of 3: rank 1 ({elsewhere}) closed its connection" in who_closed(names)


@pytest.mark.parametrize("is_final", [True, False])
def test_error_that_is_dropped_keeps_nothing_of_the_call(is_final: bool) -> None:
    held: list[weakref.ref[Group]] = []

    def call() -> None:
        group = Group()
        held.append(weakref.ref(group))
        with explained("all_reduce", RankNames([0], 0, 1), 0.5, is_final=is_final):
            raise RuntimeError("timed out")

    gc.disable()  # a group must end at once, not when the collector comes
    try:
        with suppress(CollectiveTimeoutError):
            call()
        assert held[0]() is None
    finally:
        gc.enable()


class Group:
    """Stands for what the frame of a call holds."""
