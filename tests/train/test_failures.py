"""What is told of an error; how workers end by it is tested on the command line."""

import os

import pytest
from torch.utils.data import DataLoader

from allstep.cli.launch import Watch
from allstep.comm import Communicator
from allstep.env import read_error_file, without_collector
from allstep.errors import CheckpointError, DataError, UsageError
from allstep.train import REPORTED, run_worker
from allstep.train.failures import message_of
from tests.helpers.elastic_workers import ended, hold_until
from tests.helpers.processes import Workers


class Unreadable:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise DataError("cat.jpg is no image;\nleave it out.")


@pytest.mark.parametrize("kind", [UsageError, DataError, CheckpointError])
def test_message_of_an_allstep_error(kind):
    assert (
        message_of(kind("`width` (=0) must be at least 1.")) == "`width` (=0) must be at least 1."
    )


@pytest.mark.process
def test_message_of_a_loader_processs_error():
    with pytest.raises(DataError) as caught, without_collector():  # [Note: fork]
        next(iter(DataLoader(Unreadable(), num_workers=1)))
    assert "Original Traceback" in str(caught.value)
    assert message_of(caught.value) == "cat.jpg is no image;\nleave it out."


def fail_one_after_the_other() -> None:
    """Rank 1, then rank 0."""

    def body(comm: Communicator) -> int:
        comm.barrier()
        if comm.rank == 0:
            own = read_error_file()
            assert own is not None
            hold_until(own.parent.parent / REPORTED)
        raise ValueError("no such word")

    run_worker(body)


@pytest.mark.process
def test_who_failed_first_whatever_the_date_is() -> None:
    with Workers(2, fail_one_after_the_other, (), has_logs=True) as workers:
        assert ended(workers) == [1, 1]
        os.utime(workers.error_file(0), (0, 0))  # the clock was set back between them
        watch = Watch(workers, [])
        assert watch.look(0.0)
        assert watch.failed == [0, 1]
        assert watch.root_cause == 1
