"""What is told of an error; how workers end by it is tested on the command line."""

import pytest
from torch.utils.data import DataLoader

from allstep.errors import CheckpointError, DataError, UsageError
from allstep.train.failures import message_of


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
    with pytest.raises(DataError) as caught:
        next(iter(DataLoader(Unreadable(), num_workers=1)))
    assert "Original Traceback" in str(caught.value)
    assert message_of(caught.value) == "cat.jpg is no image;\nleave it out."
