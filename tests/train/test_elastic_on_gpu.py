"""Elastic workers that share a GPU come to the bits of one that nobody has disturbed."""

import signal
from pathlib import Path

import pytest
import torch

import allstep
from allstep import Communicator
from tests.helpers import same_model
from tests.helpers.elastic_runs import OPTIONS, check_same
from tests.helpers.elastic_workers import ended, is_held, wait_until
from tests.helpers.joiners import num_joiners
from tests.helpers.on_gpu import gpu
from tests.helpers.processes import Workers
from tests.train.test_elastic import MOMENTS, HeldAt, train

pytestmark = [pytest.mark.gpu, pytest.mark.process]


def train_on_gpu(*args: object, **options: object) -> int:
    torch.backends.cudnn.deterministic = True
    return train(*args, device=gpu().type, **options)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one worker on the GPU."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    torch.backends.cudnn.deterministic = True
    comm = Communicator.single_process(gpu())
    allstep.fit(same_model.make_task("sgd"), OPTIONS, comm, run_dir)
    return run_dir


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_in(moment: str, tmp_path: Path, undisturbed: Path) -> None:
    dies_at = MOMENTS[moment]
    with Workers(4, train_on_gpu, (tmp_path, dies_at), min_workers=1) as workers:
        codes, outcomes = ended(workers), workers.outcomes()
    assert codes == [-signal.SIGKILL if rank in dies_at else 0 for rank in range(4)], outcomes
    check_same(tmp_path, undisturbed)


def test_joining(tmp_path: Path, undisturbed: Path) -> None:
    run_dir, goes_on = tmp_path / "run", tmp_path / "goes_on"
    held = HeldAt(5, goes_on)
    with Workers(2, train_on_gpu, (run_dir, {}, held), min_workers=1) as workers:
        wait_until(lambda: is_held(goes_on), workers)
        arguments, store = (run_dir, {}), workers.store_address
        with Workers(1, train_on_gpu, arguments, min_workers=1, joins=store) as joined:
            wait_until(lambda: num_joiners(store[1]) == 1, workers)
            goes_on.touch()
            assert ended(workers) == [0, 0], workers.outcomes()
            assert ended(joined) == [0], joined.outcomes()
            assert joined.outcomes()[0].value > 1000  # it has trained
    check_same(run_dir, undisturbed)
