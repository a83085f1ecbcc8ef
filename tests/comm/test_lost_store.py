"""A launcher's store that answers no more: its host is cut off, and nobody says so."""

import math
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from allstep.comm.generations import lost_store_told
from allstep.comm.system import System
from allstep.comm.work import ThreadWork
from allstep.errors import PeerLostError
from tests.helpers.nemesis.disturb import Scene, disturb
from tests.helpers.nemesis.faults import Fault, Kind
from tests.helpers.nemesis.hosts import two_hosts


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
        with pytest.raises(PeerLostError, match=r"store .* is gone"), lost_store_told():
            asked.wait(timeout_s=20.0)
