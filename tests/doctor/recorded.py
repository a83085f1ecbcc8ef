"""Ranks as threads that train a script, each seen by a recorder of `verify`."""

import contextlib
from collections.abc import Callable, Mapping, Sequence

from allstep.comm import Communicator
from allstep.doctor import RunRecord, WorkerRecord
from allstep.doctor.verify.recorder import Recorder
from tests.helpers.ranks import run_ranks


class EnoughError(Exception):
    """Leaves the script."""


def leave() -> None:
    raise EnoughError


def record_ranks(
    recorders: Sequence[Recorder],
    train: Callable[[Communicator], object],
    axes: Mapping[str, int] | None = None,
) -> RunRecord:
    """What the recorders write down; they are closed afterwards.

    Args:
        recorders: one a rank, which call `leave` at the end.
        train: the script, on a rank.
        axes: of the mesh that was asked for.
    """

    def work(comm: Communicator) -> WorkerRecord:
        recorder = recorders[comm.rank]
        with contextlib.suppress(EnoughError), contextlib.closing(recorder.ablation):
            train(comm)
        return recorder.record

    try:
        return RunRecord(run_ranks(len(recorders), work), axes or {})
    finally:
        for recorder in recorders:  # global hooks: not while another rank steps
            recorder.close()
