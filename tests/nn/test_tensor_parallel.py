"""Layers that torch's tensor parallelism divides, attached along another axis of the mesh."""

import math
import os
import re
import shutil
import signal
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator, init
from allstep.comm import shards_of
from allstep.nn import tensor_parallel
from allstep.recipes.token_loss import summed_cross_entropy
from allstep.recipes.transformer import Transformer, TransformerConfig
from allstep.recipes.transformer_parallel import tensor_parallel_plan
from tests.helpers.divided import misfit, save_whole, whole_state
from tests.helpers.messages import refused
from tests.helpers.processes import Workers, run_processes
from tests.helpers.versions import needs_torch_2_13


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    shards, found = shards_of(model), {}
    for name, p in model.named_parameters():
        assert type(p.grad) is Tensor
        shard = shards.get(name)
        parts = [p.grad] if shard is None else shard.comm.all_gather(p.grad.contiguous())
        found[name] = torch.cat(parts, shard.dim) if shard else p.grad
    return found


def transformer() -> Transformer:
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=52, sequence_length=12, width=16, depth=2, heads=4, dropout=0.2, causal=True
    )
    return Transformer(config).double()


def leave_gradients_unsummed(model: nn.Module) -> None:
    """Norms whose gradients stay what the worker's own tokens give."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.__class__ = nn.LayerNorm


def draw_by_shard(model: nn.Module) -> None:
    """Dropout as torch's SequenceParallel leaves it."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.__class__ = nn.Dropout


def gradients(
    comm: Communicator, spoil: Callable[[nn.Module], None] | None = None
) -> dict[str, Tensor]:
    """Of one step's loss, with dropout, from the same random state on all workers."""
    model = transformer()
    if comm.size > 1:
        tensor_parallel(model, comm.mesh(data=1, tensor=comm.size), tensor_parallel_plan(model))
    if spoil is not None:
        spoil(model)
    torch.manual_seed(1)
    tokens, targets = torch.randint(52, (2, 3, 12))
    targets[0, :5] = -100
    logits = model(tokens)
    if comm.size > 1:  # no worker has them whole
        assert logits.to_local().shape == (3, 12, 52 // comm.size)
    loss = summed_cross_entropy(logits.flatten(0, 1), targets.flatten())
    (0.3 * loss).backward()
    return whole_gradients(model)


@pytest.mark.process
@pytest.mark.parametrize("size", [2, 4])
def test_gradients_of_a_divided_transformer(size: int) -> None:
    expected = gradients(Communicator.single_process())
    for found in run_processes(size, gradients):
        assert found.keys() == expected.keys()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.process
def test_control_of_a_divided_transformer() -> None:
    """Without the sum of the parts, a norm gets what one worker's tokens give."""
    expected = gradients(Communicator.single_process())
    found = run_processes(2, gradients, leave_gradients_unsummed)
    for name in ("blocks.1.mlp_norm.weight", "norm.bias"):
        scale = expected[name].abs().max()
        for own in found:
            assert (own[name] - expected[name]).abs().max() > 0.05 * scale
        torch.testing.assert_close(sum(own[name] for own in found), expected[name])
    torch.testing.assert_close(found[0]["position_embedding"], expected["position_embedding"])


@pytest.mark.process
def test_control_of_dropout_along_the_sequence() -> None:
    """Where each worker draws for its own tokens, it is another model."""
    expected = gradients(Communicator.single_process())
    name = "blocks.0.attention_norm.weight"
    for found in run_processes(2, gradients, draw_by_shard):
        assert (found[name] - expected[name]).abs().max() > 0.05 * expected[name].abs().max()


# -- a loop of one's own -------------------------------------------------------------------------


def loop(
    comm: Communicator,
    num_data: int,
    run_dir: Path | None = None,
    stops_after: int | None = None,
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    forgets_group: bool = False,
    is_scaled: bool = False,
    num_epochs: int = 1,
    global_batch: int = 12,
) -> tuple[dict[str, Tensor], bool]:
    """The README's loop, along the axis of data; with a folder one that can be started again."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    mesh = comm.mesh(data=num_data, tensor=comm.size // num_data)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.Dropout(0.3)
    ).double()
    tensor_parallel(model, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
    optimizer = kind(model.parameters(), lr=0.01)
    exchange = allstep.attach(model, mesh["data"])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=is_scaled)
    torch.manual_seed(1)
    samples = TensorDataset(*(torch.randn(44, 6, dtype=torch.float64) for _ in range(2)))
    before = model.state_dict()
    with ExitStack() as stack:
        loader = stack.enter_context(
            allstep.data.loader(samples, mesh["data"], global_batch=global_batch, micro_batch=4)
        )
        checkpoint, epochs = None, iter(range(num_epochs))
        if run_dir is not None:
            checkpoint = stack.enter_context(
                allstep.AutoCheckpoint(
                    run_dir, loader, exchange, state={"optimizer": optimizer}, every_steps=1
                )
            )
            epochs = checkpoint.epochs(num_epochs)
        for _ in epochs:
            for batch in allstep.steps(loader, exchange, checkpoint=checkpoint):
                for x, y in batch:
                    batch.backward(scaler.scale((model(x) - y).square().mean()))
                if is_scaled:
                    gradient = model.get_parameter("1.weight").grad
                    assert gradient is not None
                    if batch.step == 1 and mesh["tensor"].rank == 0:
                        gradient[0, 0] = math.inf  # in one shard, and in no other
                    exchange.unscale_(scaler, optimizer)
                    exchange.clip_grad_norm_(0.02)
                for p in model.parameters() if forgets_group else ():
                    vars(p).pop("shard_group", None)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                if batch.step == stops_after:
                    signal.raise_signal(signal.SIGTERM)
    return whole_state(model), before.keys() == model.state_dict().keys()


KINDS = {
    "adamw": torch.optim.AdamW,
    "lamb": allstep.optim.LAMB,
    "lamb_of_largest": partial(
        allstep.optim.LAMB, trust_ratio=allstep.optim.TrustRatio(norm="linf")
    ),
    "lars": partial(allstep.optim.LARS, momentum=0.9, weight_decay=0.01),
}


def loops(
    comm: Communicator, num_data: int, num_epochs: int
) -> dict[str, tuple[dict[str, Tensor], bool]]:
    """The loop with each optimizer, and the control: LAMB with the norms of parts of layers.

    An epoch is four steps.
    """
    run = partial(loop, comm, num_data, num_epochs=num_epochs)
    found = {name: run(kind=kind) for name, kind in KINDS.items()}
    found["scaled"] = run(is_scaled=True)
    return found | {"control": run(kind=KINDS["lamb"], forgets_group=True)}


@pytest.mark.process
@pytest.mark.parametrize(
    ("num_workers", "num_data", "num_epochs"),
    [(4, 2, 1), pytest.param(8, 4, 5, marks=pytest.mark.slow)],
)
def test_tensor_parallel_in_an_own_loop(num_workers: int, num_data: int, num_epochs: int) -> None:
    expected = loops(Communicator.single_process(), 1, num_epochs)
    for found in run_processes(num_workers, loops, num_data, num_epochs):
        for kind in (*KINDS, "scaled"):
            state, has_same_names = found[kind]
            assert has_same_names
            for name, value in expected[kind][0].items():
                torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10)
        for name in ("1.weight", "3.weight"):
            difference = found["control"][0][name] - expected["lamb"][0][name]
            assert difference.abs().max() > 1e-4


def lamb_loop(comm: Communicator, num_data: int) -> dict[str, Tensor]:
    """Along an axis of data of two one worker has no micro-batch, and never calls the model."""
    return loop(comm, num_data, kind=allstep.optim.LAMB, global_batch=4)[0]


@pytest.mark.process
def test_norms_of_a_worker_that_has_not_called_the_model() -> None:
    expected = lamb_loop(Communicator.single_process(), 1)
    for found in run_processes(4, lamb_loop, 2):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.process
def test_tensor_parallel_in_an_own_loop_goes_on_on_another_mesh(tmp_path: Path) -> None:
    expected, _ = loop(Communicator.single_process(), 1)
    run_processes(4, loop, 2, tmp_path, 0)
    assert 0 < len(list(tmp_path.glob("checkpoints/step-*"))) < 4
    shutil.copytree(tmp_path, tmp_path / "copy", ignore=lambda *_: ["copy"])
    for found, _ in run_processes(2, loop, 1, tmp_path):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10)
    alone, _ = loop(Communicator.single_process(), 1, tmp_path / "copy")
    for name, value in expected.items():
        torch.testing.assert_close(alone[name], value, rtol=0, atol=1e-10)


# -- tokens that the workers don't divide --------------------------------------------------------


def of_some_tokens(
    comm: Communicator,
    num_tokens: int = 5,
    norm: type[nn.Module] = nn.LayerNorm,
    keeps_dtensors: tuple[bool, bool] = (True, True),
) -> dict[str, Tensor]:
    """Gradients of layers between which each worker has some of the tokens.

    Args:
        comm: the workers.
        num_tokens: of a sequence.
        norm: kind of one of the layers.
        keeps_dtensors: whether the layer before norm and dropout gives a DTensor, and these do.
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
    )

    torch.manual_seed(0)
    names = ("first", "second", "norm", "dropout", "third", "fourth")
    layers = (
        *(nn.Linear(6, 8), nn.Linear(8, 6), norm(6), nn.Dropout(0.5)),
        *(nn.Linear(6, 8), nn.Linear(8, 6)),
    )
    model = nn.Sequential(OrderedDict(zip(names, layers, strict=True))).double()
    tokens = torch.randn(3, num_tokens, 6, dtype=torch.float64)
    if comm.size > 1:
        before, local = ({"use_local_output": not keeps} for keeps in keeps_dtensors)
        plan = {
            "first": ColwiseParallel(),
            "second": RowwiseParallel(output_layouts=Shard(1), **before),
            "norm": SequenceParallel(**local),
            "dropout": SequenceParallel(**local),
            "third": ColwiseParallel(input_layouts=Shard(1)),
            "fourth": RowwiseParallel(),
        }
        tensor_parallel(model, comm.mesh(data=1, tensor=comm.size), plan)
    torch.manual_seed(1)
    model(tokens).square().sum().backward()
    return whole_gradients(model)


def cut_five_tokens(comm: Communicator) -> tuple[dict[str, Tensor], list[str]]:
    """The gradients, and what is said where layers take local parts, of an output and an input."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import PrepareModuleInput

    of_output = refused(lambda: of_some_tokens(comm, keeps_dtensors=(False, False)))
    style = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
    )
    model = tensor_parallel(nn.ReLU(), comm.mesh(data=1, tensor=comm.size), {"": style})
    assert model(torch.ones(3, 4, 6)).shape == (3, 2, 6)
    return of_some_tokens(comm), [of_output, refused(lambda: model(torch.ones(3, 5, 6)))]


@needs_torch_2_13
@pytest.mark.process
def test_tokens_that_the_workers_do_not_divide() -> None:
    expected = of_some_tokens(Communicator.single_process())
    for found, said in run_processes(2, cut_five_tokens):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        cut = "is cut along dimension 1, which must be a multiple of the 2 workers: pad it, or have"
        assert said[0].startswith(f"`model.second`'s output [3, 5, 6] {cut}")
        assert said[1].startswith(f"`model`'s input [3, 5, 6] {cut}")


class Computed(TorchFunctionMode):
    """Notes of what norms and dropout are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.types: dict[str, set[type]] = {}

    def __torch_function__(
        self, call: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if call.__name__ in ("layer_norm", "rms_norm", "dropout"):
            self.types.setdefault(call.__name__, set()).update(map(type, args[:1]))
        return call(*args, **(kwargs or {}))


LAYOUTS = [(before, after) for before in (True, False) for after in (True, False)]


def of_four_tokens(comm: Communicator, norm: type[nn.Module]) -> list[dict[str, Tensor]]:
    """Gradients in each layout, of which norm and dropout see plain tensors."""
    from torch.distributed.tensor import DTensor

    found = []
    for keeps_dtensors in LAYOUTS:
        with Computed() as computed:
            found.append(of_some_tokens(comm, 4, norm, keeps_dtensors))
        assert len(computed.types) == 2
        for kinds in computed.types.values():  # torch may have wrapped what isn't there yet
            assert not any(issubclass(kind, DTensor) for kind in kinds)
    return found


@pytest.mark.process
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_norm_and_dropout_of_a_part_of_the_tokens(norm: type[nn.Module]) -> None:
    expected = of_some_tokens(Communicator.single_process(), 4, norm)
    for found in run_processes(2, of_four_tokens, norm):
        for gradients_of_layout in found:
            torch.testing.assert_close(gradients_of_layout, expected, rtol=0, atol=1e-12)


# -- convolutions --------------------------------------------------------------------------------


def convolved(comm: Communicator, dim: int = 0, is_one_sample: bool = False) -> dict[str, Tensor]:
    """Gradients of a convolution whose input and output are sharded along a dimension."""
    from torch.distributed.tensor.parallel import SequenceParallel

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 3, stride=2, padding=1)).double()
    images = torch.randn(4, 4, 8, 8, dtype=torch.float64)
    if comm.size > 1:
        style = SequenceParallel(sequence_dim=dim, use_local_output=True)
        tensor_parallel(model, comm.mesh(data=1, tensor=comm.size), {"0": style})
    parts = (images[0] if is_one_sample else images).chunk(comm.size, dim)
    model(parts[comm.rank]).square().sum().backward()
    return whole_gradients(model)


def convolve(comm: Communicator) -> tuple[dict[str, Tensor], list[str]]:
    """Gradients by samples, and what is said of images, channels and a sample cut otherwise."""
    wrong = ({"dim": 3}, {"dim": 2}, {"dim": 1}, {"is_one_sample": True})
    return convolved(comm), [refused(partial(convolved, comm, **kwargs)) for kwargs in wrong]


@needs_torch_2_13
@pytest.mark.process
def test_convolution_under_tensor_parallel_by_samples_or_not_at_all() -> None:
    expected = convolved(Communicator.single_process())
    for found, said in run_processes(2, convolve):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        layouts = "[4, 4, 8, 8]", "[4, 4, 8, 8]", "[4, 4, 8, 8]", "[4, 8, 8]"
        for message, shape, dim in zip(said, layouts, (3, 2, 1, 0), strict=True):
            expected_words = (
                f"`model.0`, a Conv2d, has an input {shape} laid out as (Shard(dim={dim}"
            )
            assert message.startswith(expected_words)


# -- what is refused -----------------------------------------------------------------------------


def refusals(comm: Communicator, folder: Path) -> list[str]:
    """What each wrong call says."""
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

    class CutsAlongOutputs(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            return distribute_module(module, device_mesh, self._cut)

        def _cut(self, _: str, module: nn.Module, device_mesh: Any) -> None:
            for name, p in list(module.named_parameters()):
                cut = distribute_tensor(p.detach(), device_mesh, [Shard(0)])
                module.register_parameter(name, nn.Parameter(cut))

    mesh = comm.mesh(data=1, tensor=2)
    said = []

    def note(call: Callable[[], object]) -> None:
        said.append(refused(call))

    note(lambda: tensor_parallel(nn.Linear(4, 5), mesh, {"": ColwiseParallel()}))
    note(lambda: tensor_parallel(nn.Conv1d(4, 4, 3), mesh, {"": CutsAlongOutputs()}))
    note(lambda: tensor_parallel(nn.Linear(4, 4), mesh, {"": ColwiseParallel()}, axis="model"))
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    note(lambda: tensor_parallel(tied, mesh, {"0": ColwiseParallel()}))
    model = nn.Sequential(nn.Linear(4, 4))
    early = torch.optim.AdamW(model.parameters())
    early_of_more = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))], lr=0.1)
    tensor_parallel(model, mesh, {"0": ColwiseParallel()})
    note(lambda: tensor_parallel(model, mesh, {"0": ColwiseParallel()}))
    note(lambda: allstep.attach(model, comm))
    note(lambda: allstep.attach(model, mesh["tensor"]))
    exchange = allstep.attach(model, mesh["data"])
    samples = TensorDataset(torch.ones(4, 4))
    loader = allstep.data.loader(samples, mesh["data"], global_batch=4, micro_batch=2)
    note(lambda: allstep.Elastic(loader, exchange, state={}))
    both = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))], lr=0.1)
    note(lambda: allstep.AutoCheckpoint(folder, loader, exchange, state={"optimizer": both}))
    model(torch.ones(2, 4)).sum().backward()
    note(torch.optim.Adafactor(model.parameters()).step)
    note(early.step)
    note(early_of_more.step)
    exchange.detach()
    batch = next(iter(loader.global_batches()))
    note(lambda: allstep.train.sharpness(model, lambda m, x: m(x[0]).sum(), batch, mesh["data"]))
    task = allstep.Task(
        model=model,
        train_set=samples,
        test_set=samples,
        loss=lambda m, x: m(x[0]).sum(),
        metrics=lambda m, x: {"sum": (m(x[0]).sum(), 1)},
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    )
    options = allstep.TrainOptions(epochs=1, global_batch=4, micro_batch=2)
    note(lambda: allstep.fit(task, options, mesh["data"], folder))
    note(lambda: allstep.fit(task, replace(options, staleness=1), comm, folder))
    elastic = replace(options, compression="exact")
    note(lambda: allstep.fit(task, elastic, comm, folder, elastic=True))
    wider = tensor_parallel(mlp(8), mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    said.append(misfit(wider, mesh["data"], folder / "other"))
    return said


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4))


@pytest.mark.process
def test_what_tensor_parallel_refuses(tmp_path: Path) -> None:
    save_whole(mlp(6), tmp_path / "other")
    for said in run_processes(2, refusals, tmp_path):
        for words, message in zip(
            [
                "`plan` cuts `weight` [5, 4] along dimension 0, which must be a multiple of the 2",
                "`plan` cuts `weight` of a Conv1d, which torch would take for the whole:",
                "`name` (='model') is no axis of the mesh",
                "`model` has one parameter as `0.weight` and `1.weight`",
                "`model` is divided already",
                "attach it to mesh['data'], whose workers have the same shards",
                "attach it to mesh['data'], whose workers have the same shards",
                "`exchanges`: `model.0.weight` is divided over workers, and its parts would go",
                "`state`: 'optimizer' updates a model that is divided over the workers, and other",
                "The Adafactor looks at whole matrices, and of `0.weight` each worker has a part",
                "The AdamW holds what `0.weight` was before `tensor_parallel` divided it, and",
                "The SGD holds what `0.weight` was before `tensor_parallel` divided it, and",
                "`model.0.weight` is divided over the 2 workers, and each needs the second",
                "`comm` (of 1 workers) is not that of Mesh(data=1, tensor=2, rank=",
                "`staleness` (=1) is for models that are whole on every worker, and `task.model.0.",
                "`elastic` (=True): `task.model.0.weight` is divided over workers",
                "0.weight [6, 4] instead of [8, 4], 0.bias [6] instead of [8], 1.weight [4, 6] ins",
            ],
            said,
            strict=True,
        ):
            assert words in message


def differentiate_twice(comm: Communicator) -> tuple[str, dict[str, Tensor]]:
    """What is said to a gradient penalty, and gradients of the penalty past the divided layers."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), *mlp(6)).double()
    plan = {"2": ColwiseParallel(), "3": RowwiseParallel()}
    tensor_parallel(model, comm.mesh(data=1, tensor=comm.size), plan)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def penalize(module: nn.Module) -> None:
        (gradient,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()

    said = refused(lambda: penalize(model)) if comm.size > 1 else ""
    model.zero_grad()
    penalize(model[:2])
    return said, {name: p.grad for name, p in model[:2].named_parameters()}


@pytest.mark.process
def test_gradient_penalty_through_divided_layers() -> None:
    """Its gradient would be lost without a word."""
    _, expected = differentiate_twice(Communicator.single_process())
    for said, found in run_processes(2, differentiate_twice):
        assert "`create_graph` (=True): torch's DTensors lose the graph" in said
        assert "no gradient through `model.3`, which `plan` divides" in said
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def lose_a_worker_of_the_axis(dies: bool) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    with init(device="cpu", timeout_s=30.0) as comm:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        mesh = comm.mesh(data=1, tensor=comm.size)
        tensor_parallel(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        model(torch.randn(3, 4))
        if comm.rank == 1 and dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if not dies:
            raise RuntimeError("connection reset by peer")  # as a download may say
        model(torch.randn(3, 4)).sum().item()


@pytest.mark.process
def test_lost_worker_of_the_axis() -> None:
    """It is torch's own call that fails; the error says who was lost, as that of any of ours."""
    with Workers(2, lose_a_worker_of_the_axis, (True,)) as workers:
        assert workers.join() == [1, -signal.SIGKILL]
        lost = workers.outcomes()[0].value
    assert re.search(
        r"PeerLostError: A call of torch.distributed on rank 0 of 2: rank 1 \(process \d+ on .*\)"
        " closed its connection",
        lost,
    )


@pytest.mark.process
def test_error_of_the_script_itself() -> None:
    with Workers(2, lose_a_worker_of_the_axis, (False,)) as workers:
        workers.join()
        texts = [outcome.value for outcome in workers.outcomes().values()]
    assert all("RuntimeError: connection reset by peer" in text for text in texts)
    assert not any("PeerLostError: A call" in text for text in texts)


def test_tensor_parallel_on_one_worker_changes_nothing() -> None:
    mesh = Communicator.single_process().mesh(data=1, tensor=1)
    model = transformer()
    assert tensor_parallel(model, mesh, tensor_parallel_plan(model)) is model
    assert not shards_of(model)
