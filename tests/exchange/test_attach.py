"""What `attach` says, checks and leaves of the model; and how it is undone."""

import copy
import gc
import io
import logging
import pickle
import re
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from allstep.comm import Communicator
from allstep.comm.algorithms import AllReduce, Ring
from allstep.errors import DisagreementError, UsageError
from allstep.exchange import (
    Exchange,
    ExchangePolicy,
    LocalSGD,
    Nesterov,
    Stale,
    Synchronous,
    attach,
)
from allstep.exchange.runner import ThreadRunner
from allstep.exchange.wires import FullPrecision, Int8
from tests.exchange.nets import Ignoring, assert_same, clone, gradients, mlp, states
from tests.helpers.processes import run_processes
from tests.helpers.ranks import run_ranks


def with_buffers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


@pytest.mark.parametrize(
    ("size", "policy", "global_batch", "said"),
    [
        (1, None, 128, "mean over 1 worker; global batch 128; learning rate untouched"),
        (4, None, 8192, "mean over 4 workers; global batch 8,192; learning rate untouched"),
        (
            2,
            Synchronous(reduction="sum"),
            None,
            "sum over 2 workers; global batch: the loader's in `steps`, else the workers' batches"
            " together; learning rate untouched",
        ),
    ],
)
def test_says_once_what_it_will_do(
    size: int,
    policy: ExchangePolicy | None,
    global_batch: int | None,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="allstep"):
        run_ranks(size, lambda comm: attach(mlp(), comm, policy, global_batch=global_batch))
    assert [r.message for r in caplog.records if r.name == "allstep"] == [said]


def test_attach_broadcasts_rank_0s_parameters_and_buffers() -> None:
    start = with_buffers()

    def worker(comm: Communicator) -> dict[str, Tensor]:
        model = clone(start, comm)
        before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
        attach(model, comm)
        after = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
        assert after == before
        return states(model)

    for actual in run_ranks(3, worker):
        assert_same(actual, states(start), rtol=0)


@pytest.mark.parametrize("policy", [Synchronous(), Synchronous(reduction="sum")])
def test_detach_leaves_the_model_as_it_was(policy: ExchangePolicy) -> None:
    start = with_buffers()

    def worker(comm: Communicator) -> Tensor:
        model = clone(start, comm)
        keys = list(model.state_dict())
        exchange = attach(model, comm, policy)
        assert list(model.state_dict()) == keys
        model(torch.ones(4, 5)).sum().backward()
        exchange.sync_buffers()
        exchange.detach()
        for module in model.modules():
            assert not module._forward_pre_hooks and not module._forward_hooks
            assert not module._state_dict_pre_hooks
        for p in model.parameters():
            assert not p._post_accumulate_grad_hooks and not p._backward_hooks
        assert list(model.state_dict()) == keys
        model.eval().zero_grad()
        model(torch.full((1, 5), float(comm.rank))).sum().backward()
        attach(model, comm, policy)  # and once more
        return model[0].weight.grad

    first, second = run_ranks(2, worker)
    assert not first.any() and second.any()  # each has its own


@pytest.mark.parametrize("size", [1, 2])
def test_nothing_is_exchanged_after_detach(size: int, policy: ExchangePolicy) -> None:
    def worker(comm: Communicator) -> None:
        model = with_buffers()
        exchange = attach(model, comm, policy)
        model(torch.ones(4, 5)).sum().backward()
        state = exchange.state_dict()
        exchange.sync_buffers()
        for _ in range(2):
            exchange.detach()
        assert exchange.stats().num_exchanges == exchange.num_exchanges
        for name, arguments in (
            ("synchronize", ()),
            ("sync_buffers", ()),
            ("sync_parameters", ()),
            ("state_dict", ()),
            ("load_state_dict", (state,)),
        ):
            with pytest.raises(UsageError, match=rf"`{name}` was called after `detach\(\)`"):
                getattr(exchange, name)(*arguments)

    run_ranks(size, worker, timeout_s=20)


def test_a_runner_takes_no_job_after_its_end() -> None:
    runner = ThreadRunner()
    runner.submit(lambda: None).wait(20)
    runner.close(limit_s=1.0)
    with pytest.raises(UsageError, match=r"Nothing can be exchanged after `detach\(\)`"):
        runner.submit(lambda: None)


class WithoutHooks(torch.optim.SGD):
    def register_step_pre_hook(self, hook):
        raise NotImplementedError


def test_a_model_that_could_not_be_attached_is_as_before() -> None:
    def worker(comm: Communicator) -> None:
        model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 1, dtype=torch.complex128))
        with pytest.raises(UsageError, match="whose sums can't be made exact"):
            attach(model, comm, Synchronous(compression="exact"))
        with pytest.raises(NotImplementedError):
            attach(model, comm, LocalSGD(sync_every=2), optimizer=WithoutHooks(model.parameters()))
        for module in model.modules():
            assert not module._forward_pre_hooks and not module._forward_hooks
            assert not module._state_dict_pre_hooks
        for p in model.parameters():
            assert not p._post_accumulate_grad_hooks and not p._backward_hooks
        attach(model, comm)

    run_ranks(2, worker, timeout_s=20)


_LOADING = threading.Lock()  # what is safe to load is the process's


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    assert b"allstep" not in file.getvalue()
    file.seek(0)
    kinds = {type(module) for module in model.modules()}
    with _LOADING, torch.serialization.safe_globals([*kinds, _own_hook]):
        return torch.load(file, weights_only=True)


def _own_hook(*_: object) -> None:
    """A user's."""


class WithState(nn.Sequential):
    """Says by itself what is pickled of it."""

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"cache": None}


def hooks_of(model: nn.Module) -> list[object]:
    dicts = [
        value
        for module in model.modules()
        for name, value in vars(module).items()
        if name.endswith("_hooks")
    ]
    dicts += [p._post_accumulate_grad_hooks or {} for p in model.parameters()]
    return [hook for hooks in dicts for hook in hooks.values()]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("copied_by", [saved_and_loaded, copy.deepcopy])
def test_hooks_stay_with_the_attached_model(
    copied_by: Callable[[nn.Module], nn.Module], size: int
) -> None:
    def worker(comm: Communicator) -> None:
        model = WithState(*with_buffers())
        model.cache = {}
        model[0].register_forward_hook(_own_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exchange = attach(model, comm, LocalSGD(sync_every=2), optimizer=optimizer)
        for part in (model, model[1]):
            copied = copied_by(part)
            assert hooks_of(copied) == ([_own_hook] if part is model else [])
            assert "__getstate__" not in vars(copied)
        assert copied_by(model).cache is None
        assert_same(states(copied_by(model)), states(model), rtol=0)
        copied_by(copied_by(model))(torch.ones(4, 5)).sum().backward()
        assert exchange.num_exchanges == 0
        assert b"allstep" not in pickle.dumps(optimizer)
        exchange.detach()
        assert hooks_of(model) == [_own_hook]
        assert not any("__getstate__" in vars(module) for module in model.modules())

    run_ranks(size, worker)


class Counting(nn.Linear):
    """Counts its calls, until it is told to stop."""

    def __init__(self) -> None:
        super().__init__(5, 4)
        self.num_calls = 0
        self.handles = [self.register_forward_hook(Counting.count)]

    def count(self, *_: object) -> None:
        self.num_calls += 1


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "copied_by", [lambda model: pickle.loads(pickle.dumps(model)), copy.deepcopy]
)
def test_a_copy_keeps_its_hold_of_its_own_hooks(
    copied_by: Callable[[nn.Module], nn.Module], size: int
) -> None:
    def worker(comm: Communicator) -> None:
        counting = Counting()
        lazy = nn.Sequential(nn.LazyLinear(3))
        for model in (counting, lazy):
            attach(model, comm)
            assert b"allstep" not in pickle.dumps(model).replace(__name__.encode(), b"")
        copied = copied_by(counting)
        copied(torch.ones(2, 5))
        assert [hook.remove() for hook in copied.handles] == [None]
        copied(torch.ones(2, 5))
        assert copied.num_calls == 1
        lazy = copied_by(lazy)
        for _ in range(2):  # its own hook makes the parameters in the first call, and goes
            assert lazy(torch.ones(2, 5)).shape == (2, 3)

    run_ranks(size, worker)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_is_not_attached(how: str) -> None:
    start = with_buffers()

    def worker(comm: Communicator) -> None:
        model = clone(start, comm)
        exchange = attach(model, comm)
        copied = copy.deepcopy(model) if how == "deepcopy" else saved_and_loaded(model)
        if comm.rank == 0:  # alone
            copied.add_module("late", nn.Linear(1, 1))
            with exchange.statistics.step(), exchange.statistics.micro_batch(1.0):
                copied(torch.ones(4, 5)).sum().backward()
        assert exchange.num_exchanges == 0
        model(torch.ones(4, 5)).sum().backward()
        assert exchange.num_exchanges == 1

    run_ranks(2, worker)


def test_refuses_a_model_twice() -> None:
    comm = Communicator.single_process()
    model = mlp()
    exchange = attach(model, comm)
    with pytest.raises(UsageError, match=r"`model` is attached already; call `detach\(\)`"):
        attach(model, comm)
    with pytest.raises(UsageError, match=r"`model\.0` is attached already"):
        attach(nn.Sequential(model), comm)
    exchange.detach()
    attach(model, comm)


def test_refuses_parameters_of_an_attached_model() -> None:
    def worker(comm: Communicator) -> None:
        model = mlp()
        attach(model, comm)
        with pytest.raises(UsageError, match=r"Parameter `weight` is attached already.*ModuleList"):
            attach(model[0], comm)

    run_ranks(2, worker)


@pytest.mark.parametrize("size", [1, 2])
def test_refuses_ddp_around_and_inside(size: int) -> None:
    def worker(comm: Communicator) -> None:
        ddp = DistributedDataParallel(mlp(), process_group=comm.process_group)
        words = r"is a DistributedDataParallel, .* attach the module inside .* `allstep\.ddp_hook`"
        with pytest.raises(UsageError, match="`model` " + words):
            attach(ddp, comm)
        with pytest.raises(UsageError, match=r"`model\.1` " + words):
            attach(nn.Sequential(nn.Tanh(), ddp), comm)

    run_ranks(size, worker)


@pytest.mark.parametrize("size", [1, 2])
def test_refuses_ddp_of_what_is_attached(size: int) -> None:
    """Or of a part, which may be called by itself; not after `detach`, nor of other models."""

    def worker(comm: Communicator) -> None:
        model = mlp()
        exchange = attach(model, comm)
        make_ddp = partial(DistributedDataParallel, process_group=comm.process_group)
        for made_of in (model, model[0], nn.Sequential(model)):
            with pytest.raises(UsageError, match=r"made of the .*without DDP.*`allstep\.ddp_hook`"):
                make_ddp(made_of)
        make_ddp(mlp())
        exchange.detach()
        make_ddp(model[0])

    run_ranks(size, worker)


def refuse_ddp_made_before(comm: Communicator, kind: type[DistributedDataParallel]) -> None:
    model = mlp()
    for made_of in (model, model[0], nn.Sequential(model)):
        ddp = kind(made_of)
        with pytest.raises(UsageError, match=r"was made of the .*without DDP.*`allstep\.ddp_hook`"):
            attach(model, comm)
        del ddp  # it holds itself, and exchanges until the collector comes
    attach(model, comm).detach()
    of_another = kind(mlp())
    exchange = attach(model, comm)
    whole = copy.deepcopy(model)
    x = torch.full((2, 5), 1.0 + comm.rank)
    of_another(x).sum().backward()
    model(x).sum().backward()
    for rank in range(comm.size):
        whole(torch.full((2, 5), 1.0 + rank)).sum().div(comm.size).backward()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    exchange.detach()


class DerivedDDP(DistributedDataParallel):
    """As a framework may have its own."""


@pytest.mark.process
@pytest.mark.parametrize("kind", [DistributedDataParallel, DerivedDDP])
def test_refuses_ddp_made_before(kind: type[DistributedDataParallel]) -> None:
    """Of the model, of a part, which may be called by itself, and around it; not once gone."""
    run_processes(2, refuse_ddp_made_before, kind)


def scripted() -> nn.Module:
    with warnings.catch_warnings(action="ignore"):  # torch calls it deprecated
        return torch.jit.script(mlp())


def test_refuses_a_script_module() -> None:
    comm = Communicator.single_process()
    with pytest.raises(
        UsageError, match=r"`model` is a Rec.*, which takes no hooks: attach the nn"
    ):
        attach(scripted(), comm)
    with pytest.raises(UsageError, match=r"`model\.1` is a Rec.*`torch\.compile`"):
        attach(nn.Sequential(nn.Tanh(), scripted()), comm)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_refuses_elements_that_share_memory(kind: str, size: int) -> None:
    def worker(comm: Communicator) -> None:
        model = nn.Linear(3, 2)
        if kind == "parameter":
            model.weight = nn.Parameter(torch.ones(1, 3).expand(2, 3))
        else:
            model.register_buffer("weights", torch.ones(1, 3).expand(2, 3))
        words = r"`weights?` has elements that share memory \(shape \(2, 3\), strides \(0, 1\), as"
        with pytest.raises(UsageError, match=words):
            attach(model, comm)
        assert hooks_of(model) == []

    run_ranks(size, worker)


def test_refuses_what_is_no_model() -> None:
    comm = Communicator.single_process()
    optimizer = torch.optim.SGD(mlp().parameters(), lr=0.1)
    with pytest.raises(
        UsageError, match=r"`model` \(a SGD\) must be a Module: that whose gradients"
    ):
        attach(optimizer, comm)  # type: ignore[arg-type]
    with pytest.raises(
        UsageError, match=r"`comm` \(=.*\) must be a Communicator: that of `allstep\.init\(\)`"
    ):
        attach(mlp(), "gloo")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"`model` \(a Communicator\) must be a Module"):
        attach(comm, mlp())  # type: ignore[arg-type]


def test_refuses_a_global_batch_below_one() -> None:
    with pytest.raises(UsageError, match=r"`global_batch` \(=0\) must be at least 1"):
        attach(mlp(), Communicator.single_process(), global_batch=0)


def test_refuses_an_unknown_reduction() -> None:
    with pytest.raises(UsageError, match=r"`reduction` \(='median'\): did you mean `mean`"):
        Synchronous(reduction="median")


def one_ring(comm: Communicator) -> AllReduce:
    return Ring(comm)


@pytest.mark.parametrize(
    ("name", "value", "usual", "other"),
    [
        ("reduction", "sum", "'mean'", "'sum'"),
        ("compression", "int8", "FullPrecision()", "Int8(block=256, error_feedback=True)"),
        ("algorithm", "ring", "None", "'ring'"),
        ("algorithm", one_ring, "None", f"{__name__}.one_ring"),
        ("algorithm", partial(Ring, order=(1, 0)), "None", "functools.partial"),
        ("bucket_bytes", 64, "None", "64"),
        ("overlap", False, "True", "False"),
        ("plain", True, "False", "True"),
        ("first_timeout_s", 9.0, "120.0", "9.0"),
    ],
)
def test_names_what_differs_in_the_policies_and_the_ranks(
    name: str, value: object, usual: str, other: str
) -> None:
    """Before anything is sent that only some expect."""

    def worker(comm: Communicator) -> None:
        policy = Synchronous(**{name: value}) if comm.rank == 1 else None
        with pytest.raises(DisagreementError) as caught:
            attach(mlp(), comm, policy)
        assert str(caught.value) == (
            f"Workers that attach a model disagree: `{name}` is {usual} on ranks 0, 2; {other}"
            " on rank 1. Pass the same policy on every worker."
        )

    run_ranks(3, worker, timeout_s=20)


@pytest.mark.parametrize(
    ("policies", "words"),
    [
        ((Synchronous(), Stale()), "`policy` is Synchronous on rank 0; Stale on rank 1"),
        ((Stale(steps=1), Stale(steps=2)), "`steps` is 1 on rank 0; 2 on rank 1"),
        (
            (LocalSGD(sync_every=2), LocalSGD(sync_every=2, local_after_step=3)),
            "`local_after_step` is 0 on rank 0; 3 on rank 1",
        ),
        (
            (LocalSGD(sync_every=2), LocalSGD(sync_every=2, outer_optimizer=Nesterov())),
            "`outer_optimizer` is None on rank 0; Nesterov(lr=0.7, momentum=0.9) on rank 1",
        ),
    ],
)
def test_policies_of_other_types_or_options_differ(
    policies: tuple[ExchangePolicy, ExchangePolicy], words: str
) -> None:
    def worker(comm: Communicator) -> None:
        with pytest.raises(DisagreementError, match=re.escape(words)):
            attach(mlp(), comm, policies[comm.rank])

    run_ranks(2, worker, timeout_s=20)


def test_names_every_argument_that_differs() -> None:
    def worker(comm: Communicator) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters()) if comm.rank else None
        scaler = None if comm.rank else torch.amp.GradScaler("cpu")
        policy = LocalSGD(sync_every=2 + comm.rank)
        with pytest.raises(DisagreementError) as caught:
            attach(model, comm, policy, optimizer=optimizer, scaler=scaler)
        for words in (
            "`sync_every` is 2 on rank 0; 3 on rank 1",
            "`optimizer` is None on rank 0; given on rank 1",
            "`scaler` is given on rank 0; None on rank 1",
        ):
            assert words in str(caught.value)

    run_ranks(2, worker, timeout_s=20)


class Own(FullPrecision):
    """A format of the user's, in two places of memory."""


def test_equal_policies_may_be_written_in_other_words() -> None:
    def worker(comm: Communicator) -> None:
        for wire, algorithm in (
            (("int8", Int8())[comm.rank], None),
            (Own(), (lambda comm: Ring(comm), lambda comm: Ring(comm))[comm.rank]),
        ):
            attach(mlp(), comm, Synchronous(compression=wire, algorithm=algorithm))

    run_ranks(2, worker)


def test_names_the_tensor_that_differs_and_the_ranks() -> None:
    def worker(comm: Communicator) -> None:
        model = mlp()
        if comm.rank == 1:
            model[2] = nn.Linear(7, 4)
        if comm.rank == 2:
            model.double().half()
        with pytest.raises(DisagreementError) as caught:
            attach(model, comm)
        assert (
            "`0.weight` is (7, 5) torch.float64 on ranks 0, 1; (7, 5) torch.float16 on rank 2"
        ) in str(caught.value)

    run_ranks(3, worker)


def test_names_a_missing_buffer() -> None:
    def worker(comm: Communicator) -> None:
        model = mlp()
        if comm.rank == 1:
            model.register_buffer("extra", torch.zeros(2))
        with pytest.raises(DisagreementError, match=r"`extra` is missing on rank 0; \(2,\)"):
            attach(model, comm)

    run_ranks(2, worker)


def test_notices_another_order() -> None:
    def worker(comm: Communicator) -> None:
        names = ["a", "b"] if comm.rank else ["b", "a"]
        with pytest.raises(DisagreementError, match="order differs"):
            attach(nn.ModuleDict({name: nn.Linear(1, 1) for name in names}), comm)

    run_ranks(2, worker)


def test_sparse_gradients_are_refused_with_the_cure_on_all_ranks() -> None:
    def worker(comm: Communicator, rank: int) -> str:
        model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
        exchange = attach(model, comm)
        with pytest.raises((UsageError, DisagreementError)) as caught:
            if comm.rank >= rank:
                model(torch.tensor([1, 2])).sum().backward()
            else:
                exchange.synchronize()
        return type(caught.value).__name__ + str(caught.value)

    words = r"Parameter `0.weight` has a sparse gradient"
    for message in run_ranks(2, lambda comm: worker(comm, 0)):
        assert message.startswith("UsageError") and words in message and "sparse=False" in message
    other, own = run_ranks(2, lambda comm: worker(comm, 1))
    assert own.startswith("UsageError") and words in own
    assert other.startswith("DisagreementError") and words in other and "rank 1" in other


def test_different_calls_are_an_error_not_a_hang() -> None:
    def worker(comm: Communicator) -> None:
        model = mlp()
        exchange = attach(model, comm)
        with pytest.raises(DisagreementError) as caught:
            if comm.rank:
                exchange.sync_buffers()
            else:
                model(torch.ones(1, 5)).sum().backward()
        words = r"rank 0 wants: exchange gradients 0.*; rank 1 wants: sum running statistics"
        assert re.search(words, str(caught.value))

    run_ranks(2, worker)


def test_an_attached_model_can_be_collected() -> None:
    import gc
    import weakref

    model = mlp()
    attach(model, Communicator.single_process())
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_gradients_before_and_after(policy: ExchangePolicy) -> None:
    """A gradient from before `attach` takes part in the first exchange that touches it."""

    def worker(comm: Communicator) -> dict[str, Tensor | None]:
        model = nn.Linear(1, 1, bias=False)
        model(torch.full((1, 1), float(comm.rank))).sum().backward()
        exchange = attach(model, comm, policy)
        exchange.synchronize()
        return gradients(model)

    for found in run_ranks(3, worker):
        assert found["weight"].item() == 1.0


@pytest.mark.parametrize("wire", ["fp32", "exact"])
@pytest.mark.parametrize("size", [1, 2])
def test_an_exchange_goes_with_its_model_and_not_before(size: int, wire: str) -> None:
    def worker(comm: Communicator) -> tuple[bool, weakref.ref[Exchange], Tensor]:
        model = mlp()
        exchange = weakref.ref(attach(model, comm, Stale(compression=wire, steps=1)))
        for _ in range(3):
            model(torch.ones(2, 5)).sum().backward()
            model.zero_grad()
        gc.collect()
        was_there = exchange() is not None
        parameter = model[0].bias
        del model
        return was_there, exchange, parameter

    for was_there, exchange, parameter in run_ranks(size, worker):
        gc.collect()
        assert was_there
        assert exchange() is None
        with pytest.raises(UsageError, match="The model of this parameter is gone"):
            parameter.sum().backward()


@pytest.mark.parametrize("policy", [Synchronous(), Synchronous(algorithm="ring")])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda net: net.to(memory_format=torch.channels_last),
            r"strides \(27, 1, 9, 3\) on rank 1",
        ),
        (lambda net: net.requires_grad_(False), "without gradient on rank 1"),
    ],
)
def test_attach_refuses_other_memory_orders_and_frozen_parameters(
    policy: ExchangePolicy, change: Callable[[nn.Module], object], words: str
) -> None:
    def worker(comm: Communicator) -> None:
        net = nn.Conv2d(3, 4, 3)
        if comm.rank == 1:
            change(net)
        with pytest.raises(DisagreementError, match=f"`weight` is .*{words}"):
            attach(net, comm, policy)

    run_ranks(2, worker, timeout_s=20)


def test_auto_algorithm_with_an_empty_parameter() -> None:
    def worker(comm: Communicator) -> Tensor:
        nets = nn.ModuleList([nn.Module(), nn.Linear(600, 600, bias=False)])
        nets[0].empty = nn.Parameter(torch.zeros(3, 0))
        attach(nets, comm, Synchronous(algorithm="auto"))
        (nets[0].empty.sum() + nets[1](torch.ones(1, 600) * comm.rank).sum()).backward()
        return nets[1].weight.grad

    for gradient in run_ranks(2, worker, timeout_s=20):
        assert gradient.eq(0.5).all()


def test_sum_of_an_undefined_gradient_is_none() -> None:
    def worker(comm: Communicator) -> None:
        net = Ignoring()
        attach(net, comm, Synchronous(reduction="sum"))
        net().sum().backward()
        assert net.ignored.grad is None
        assert net.used.grad.item() == 2

    run_ranks(2, worker, timeout_s=20)
