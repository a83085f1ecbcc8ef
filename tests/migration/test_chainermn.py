"""The lines of docs/migration/chainermn.md."""

import torch
from torch import Tensor, nn

import allstep
from allstep.comm import Communicator, autograd
from tests.helpers.migration import Page
from tests.helpers.ranks import run_ranks

PAGE = Page("chainermn")

# Communicator
PAGE.tried_in("comm/test_initialise.py::test_script_under_mpirun", "`create_communicator(")
PAGE.tried_in(
    "comm/test_algorithms.py::test_every_algorithm_gives_the_sum_on_every_rank",
    '`"hierarchical"`, ',
)
PAGE.tried_in("exchange/test_wires.py::test_mean_within_the_stated_bound", "`allreduce_grad_dtype=")
PAGE.tried_in(
    "comm/test_threads.py::test_run_ranks_on_several_nodes",
    *("`rank`, `size`", "`intra_rank`, ", "`inter_rank`, "),
)
PAGE.tried_in("comm/test_initialise.py::test_init_with_a_process_group", "`mpi_comm`")
PAGE.tried_in(
    "comm/test_communicator.py::test_split_orders_by_key_then_rank_and_none_joins_nothing",
    "`split(",
)
PAGE.tried_in("comm/test_tensors.py::test_all_reduce_has_its_closed_form", "`allreduce(x)`")
PAGE.tried_in(
    "comm/test_tensors.py::test_ragged_tensors_and_tuples_travel_by_all_verbs",
    *("`allgather(x)`, ", "`bcast(x, root)`, "),
)
PAGE.tried_in("comm/test_tensors.py::test_tags_tell_messages_apart", "`send(x, rank, tag)`")
PAGE.tried_in("comm/test_objects.py::test_every_verb_on_objects", "`send_obj`, ")
PAGE.tried_in("comm/test_objects.py::test_all_reduce_object_adds", "`allreduce_obj(")
PAGE.tried_in(
    "exchange/test_attach.py::test_attach_broadcasts_rank_0s_parameters_and_buffers",
    *("`bcast_data(", "the first `update()`"),
)
PAGE.tried_in("comm/test_communicator.py::test_close_ends_a_communicator", "`finalize()`")
PAGE.tried_in("comm/test_initialise.py::test_bad_timeout", "`set_config`, ")
PAGE.tried_in(
    "comm/test_tensors.py::test_reductions_of_different_tensors_error", "debug mode's check"
)

# Optimizer
PAGE.tried_in(
    "exchange/test_gradients.py::test_ten_steps_equal_one_process",
    "`create_multi_node_optimizer(",
)
PAGE.tried_in(
    "exchange/test_staleness.py::test_stale_training_equals_the_reference", "`double_buffering="
)
PAGE.tried_in(
    "exchange/test_gradients.py::test_used_parameters_differ_by_rank_and_step", "`zero_fill=True`"
)
PAGE.tried_in(
    "exchange/test_parameters.py::test_lazy_modules_materialise_with_rank_0s_values",
    "parameters that appear later",
)
PAGE.tried_in(
    "train/test_steps.py::test_steps_gradient_is_that_of_the_mean_over_the_global_batch",
    "a batch per worker",
)

# Data
PAGE.tried_in("data/test_split.py::test_shuffled_parts_cover_the_set", "`scatter_dataset(")
PAGE.tried_in(
    "data/test_split.py::test_from_one_worker",
    *("a data set on rank 0 only", "`create_empty_dataset("),
)
PAGE.tried_in(
    "data/test_split.py::test_equal_length_repeats_from_the_start", "`force_equal_length=True`"
)
PAGE.tried_in(
    "data/test_loader.py::test_same_contents_on_any_number_of_workers",
    "`create_multi_node_iterator`",
)
PAGE.tried_in(
    "data/test_loader.py::test_resume_on_another_number_of_workers", "epoch triggers that count"
)

# Extensions
PAGE.tried_in(
    "train/test_evaluator.py::test_evaluator_counts_are_exact_on_any_number_of_workers",
    "`create_multi_node_evaluator(",
)
PAGE.tried_in("comm/test_objects.py::test_every_verb_on_objects", "`GenericMultiNodeEvaluator`")
PAGE.tried_in(
    "train/test_auto_checkpoint.py::test_another_number_of_workers_goes_on",
    "`create_multi_node_checkpointer`",
)
PAGE.tried_in(
    "exchange/test_batch_norm.py::test_plain_loop_with_one_micro_batch_per_worker_needs_no_step",
    "`AllreducePersistent(",
)
PAGE.tried_in(
    "train/test_best.py::test_own_loop_keeps_it_in_an_auto_checkpoint",
    "`MultiNodeEarlyStoppingTrigger`",
)
PAGE.tried_in(
    "comm/test_communicator.py::test_an_error_on_one_rank_ends_the_others_at_once",
    "`global_except_hook`",
)

# Functions and links
PAGE.tried_in(
    "comm/test_autograd.py::test_derivatives_of_symmetric_calls", "`functions.allgather`, "
)
PAGE.tried_in(
    "nn/test_chain.py::test_chain_is_the_same_model_wherever_its_parts_lie",
    *("`links.MultiNodeChainList(", "`links.create_multi_node_n_step_rnn("),
)
PAGE.tried_in(
    "nn/test_batch_norm.py::test_training_is_the_same_on_any_number_of_workers",
    "`links.create_mnbn_model(",
)
PAGE.tried_in(
    "nn/test_batch_norm.py::test_group_across_workers_is_whole_batch_norm",
    "`links.MultiNodeBatchNormalization(",
)


@PAGE.tries("`multi_node_mean_grad(")
def test_mean_of_gradients_made_beside_the_exchange() -> None:
    def gradient(comm: Communicator) -> list[float]:
        model = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
        exchange = allstep.attach(model, comm)
        with exchange.no_sync():  # the second is used by rank 1 only
            model[comm.rank](torch.full((1, 1), comm.rank + 1.0)).sum().backward()
        exchange.synchronize()
        return [p.grad.item() for p in model.parameters() if p.grad is not None]

    assert run_ranks(2, gradient) == [[0.5, 1.0]] * 2


@PAGE.tries("`scatter_index(")
def test_indices_of_a_part() -> None:
    def part(comm: Communicator) -> tuple[int, int]:
        part = allstep.data.split(range(7), comm)
        return part[0], part[len(part) - 1] + 1

    assert run_ranks(3, part) == [(0, 3), (3, 5), (5, 7)]


@PAGE.tries("`ObservationAggregator`")
def test_mean_of_an_observation() -> None:
    found = run_ranks(3, lambda comm: comm.all_reduce(torch.tensor(comm.rank + 1.0), "mean"))
    assert found == [2.0] * 3


@PAGE.tries("`functions.send(", "`functions.pseudo_connect(")
def test_a_net_over_two_ranks() -> None:
    """Rank 0's layer gets the gradient of rank 1's loss through a message and back."""

    def work(comm: Communicator) -> Tensor:
        w = torch.full((2,), 3.0, requires_grad=True)
        if comm.rank == 0:
            delegate = autograd.send(comm, w * torch.tensor([1.0, 2.0]), 1, 5)
            autograd.pseudo_connect(delegate, 0 * w.sum()).backward()
        else:
            (w * autograd.recv(comm, 0, 5)).sum().backward()
        assert w.grad is not None
        return w.grad

    first, second = run_ranks(2, work)
    assert first.tolist() == [3.0, 6.0]  # the other's weight times its own input
    assert second.tolist() == [3.0, 6.0]  # what has come


def test_every_line_is_tried() -> None:
    assert PAGE.untried() == []
