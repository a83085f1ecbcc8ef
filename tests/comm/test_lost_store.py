"""A launcher's store that answers no more: its host is cut off, and nobody says so."""

import math
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from allstep.comm.generations import await_others, raising_if_store_lost
from allstep.comm.membership import Membership
from allstep.comm.system import System
from allstep.comm.work import ThreadWork
from allstep.env import Launch
from allstep.errors import PeerLostError, UsageError
from tests.helpers.nemesis.disturb import Scene, disturb
from tests.helpers.nemesis.faults import Fault, Kind
from tests.helpers.nemesis.hosts import two_hosts
from tests.helpers.ports import silent_port


@pytest.mark.net
@pytest.mark.parametrize("kind", ["drop", "link down"])
def test_no_call_waits_for_ever(kind: Kind, tmp_path: Path) -> None:
    """By itself the system would send the question again for a quarter of an hour."""
    with two_hosts(tmp_path) as (near, far):
        with near.network():
            served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with far.network():
            store = System(near.address).open_store(near.address, served.port, patience_s=1.0)
        store.set("before", "")
        disturb(Fault(kind, 0, 0, math.inf), Scene({}, [near, far], far, tmp_path, tmp_path))
        asked = ThreadWork.start(lambda: store.check(["before"]), "asks")
        with pytest.raises(PeerLostError, match=r"store .* is gone"), raising_if_store_lost():
            asked.wait(timeout_s=20.0)


def test_first_workers_end_before_they_meet() -> None:
    """Where the store is another process's, it stays; who waits to join would wait for ever."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launch = Launch(
        "torchrun", 0, 1, 0, 1, 0, 1, "127.0.0.1", store.port, "job", min_workers=1, joins=True
    )
    waits = Membership(launch, grace_s=1.0)
    assert await_others(store, "job", []) is None
    with pytest.raises(UsageError, match="The run has ended: there is nothing to join"):
        waits.next(-1)


def test_a_worker_that_comes_when_the_run_has_ended_is_told_so(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """At once: torch's store would try again, and print its own frames."""
    with silent_port() as port:
        launch = Launch(
            "torchrun", 0, 1, 0, 1, 0, 1, "127.0.0.1", port, "job", min_workers=1, joins=True
        )
        with pytest.raises(UsageError, match=rf"answers at 127\.0\.0\.1:{port}; it has ended"):
            Membership(launch, grace_s=1.0)
    assert capfd.readouterr().err == ""
