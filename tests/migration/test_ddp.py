"""The lines of docs/migration/ddp.md."""

from torch import nn

import allstep
from allstep.comm import Communicator
from tests.helpers.migration import Page
from tests.helpers.ranks import run_ranks

PAGE = Page("ddp")
PAGE.tried_in(
    "train/test_steps.py::test_steps_gradient_is_that_of_the_mean_over_the_global_batch",
    "`batch_size` is per worker",
    "a last short batch",
)
PAGE.tried_in("data/test_sampler.py::test_each_sample_once_an_epoch", "`DistributedSampler`")
PAGE.tried_in("data/test_sampler.py::test_epochs_and_seeds_differ", "forgetting `set_epoch`")
PAGE.tried_in(
    "exchange/test_batch_norm.py::test_equal_on_any_number_of_workers", "batch norm keeps"
)
PAGE.tried_in(
    "train/test_steps.py::test_steps_refuse_batch_norm_that_is_synchronized_in_each_micro_batch",
    "`SyncBatchNorm`",
)
PAGE.tried_in("exchange/test_batch_norm.py::test_other_buffers_become_rank_0s", "rank 0's other")
PAGE.tried_in(
    "data/test_loader.py::test_same_contents_on_any_number_of_workers", "dropout and augmentation"
)
PAGE.tried_in("exchange/test_batch_norm.py::test_workers_without_a_micro_batch", "uneven inputs")
PAGE.tried_in(
    "train/test_loop.py::test_loggers_are_called_on_rank_0_and_end_nothing", "`if rank == 0:`"
)
PAGE.tried_in("train/test_best.py::test_all_workers_stop_at_the_same_step", "early stopping")
PAGE.tried_in(
    "exchange/test_gradients.py::test_used_parameters_differ_by_rank_and_step",
    "an unused parameter",
)
PAGE.tried_in(
    "comm/test_communicator.py::test_an_error_on_one_rank_ends_the_others_at_once",
    "waits ten minutes",
)


@PAGE.tries("`model.module`")
def test_names_of_the_state_dict_are_the_model_s() -> None:
    def names(comm: Communicator) -> list[str]:
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        before = list(model.state_dict())
        allstep.attach(model, comm)
        assert list(model.state_dict()) == before
        return before

    wrapped = nn.DataParallel(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))).state_dict()
    prefixed = [name.removeprefix("module.") for name in wrapped]  # "Checkpoints made under DDP"
    assert run_ranks(2, names) == [prefixed] * 2 and prefixed != list(wrapped)


def test_every_line_is_tried() -> None:
    assert PAGE.untried() == []
