"""Modules on several ranks are one model, with its gradients and its dropout, wherever they lie."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import allstep
from allstep.comm import Communicator
from allstep.errors import DisagreementError, UsageError
from allstep.nn import Chain, ChainPart, replicated
from tests.helpers import generators
from tests.helpers.compare import differing_names
from tests.helpers.divided import misfit, save_whole
from tests.helpers.generators import seeded_thread, thread_generators  # noqa: F401
from tests.helpers.ranks import run_ranks


def values(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def with_weights(module: nn.Module, seed: int) -> nn.Module:
    """In float64, whichever thread makes it."""
    module = module.double()
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(0.3 * values(*p.shape, seed=100 * seed + i))
    return module


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return self.rnn(nn.functional.dropout(x, 0.3))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, 4, batch_first=True)

    def forward(self, y: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.dropout(self.rnn(y, state)[0], 0.3)


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(a).tanh() + self.linear(b), b.mean((1, 2))


PLACES = [(0, 0, 0), (0, 1, 0), (1, 0, 2), (2, 1, 0), (0, 1, 7)]


def parts(places: tuple[int, ...]) -> list[ChainPart]:
    """An RNN whose state crosses ranks, two ways that join again, and two outputs."""
    made = [lambda: with_weights(Encoder(), 1), lambda: with_weights(Decoder(), 2)]
    return [
        ChainPart("join", lambda: with_weights(Join(), 3), places[2], ("h", "d"), ("y", "z")),
        ChainPart("encoder", made[0], places[0], ("x",), ("h", "state")),
        ChainPart("decoder", made[1], places[1], ("y0", "state"), ("d",)),
    ]


def not_seeded(seed: int, device: torch.device):
    return nullcontext()


def chain_on(
    comm: Communicator,
    parts: list[ChainPart],
    inputs: tuple[str, ...] = ("x",),
    outputs: tuple[str, ...] = ("y",),
    **options: Any,
) -> Chain:
    mesh = comm.mesh(data=1, model=comm.size)
    return Chain(parts, mesh, inputs=inputs, outputs=outputs, **options)


def train(comm: Communicator, places: tuple[int, ...], seeded=seeded_thread) -> dict[str, Tensor]:
    chain = chain_on(comm, parts(places), ("x", "y0"), ("y", "z"), seeded=seeded)
    own = list(chain.parameters())
    optimizer = torch.optim.SGD(own, lr=0.05, momentum=0.9) if own else None
    for step in range(20):
        generators.seed_this_thread(step)
        found, delegate = chain(x=values(5, 6, 3, seed=step), y0=values(5, 6, 3, seed=-step))
        assert list(found) == (["y", "z"] if comm.rank == places[2] else [])
        loss = delegate
        if found:
            loss = loss + found["y"].square().mean() + (found["z"] - 1).square().mean()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return {name: p.detach() for name, p in chain.named_parameters()}


def merged(found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: p for own in found for name, p in own.items()}


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.fixture(scope="module")
def alone():
    return merged(run_ranks(1, lambda comm: train(comm, PLACES[0])))


@pytest.mark.parametrize("places", PLACES[1:])
def test_chain_is_the_same_model_wherever_its_parts_lie(alone, places):
    found = merged(run_ranks(max(places) + 1, lambda comm: train(comm, places)))
    assert largest_difference(found, alone) < 1e-10


def test_chain_whose_dropout_belongs_to_ranks_is_another(alone):
    found = merged(run_ranks(2, lambda comm: train(comm, PLACES[1], not_seeded)))
    assert largest_difference(found, alone) > 1e-3


@pytest.mark.parametrize("last", [1, 2])
def test_chain_begins_with_the_same_values_wherever_its_parts_lie(last):
    """From equal seeds; parts of one shape begin with others."""

    def begun(comm: Communicator) -> tuple[dict[str, Tensor], Tensor]:
        generators.seed_this_thread(5)
        rank = min(last, comm.size - 1)
        second = ChainPart("b", lambda: nn.Linear(3, 3).double(), rank, ("h",), ("y",))
        first = ChainPart("a", lambda: nn.Linear(3, 3).double(), 0, ("x",), ("h",))
        chain = chain_on(comm, [first, second], seeded=seeded_thread)
        return {name: p.detach() for name, p in chain.named_parameters()}, torch.rand(3)

    [(alone, drawn)] = run_ranks(1, begun)
    found, all_drawn = zip(*run_ranks(last + 1, begun), strict=True)
    assert largest_difference(merged(found), alone) == 0
    assert all(torch.equal(x, drawn) for x in all_drawn)  # what follows, too
    assert not torch.equal(alone["parts.a.weight"], alone["parts.b.weight"])


SAMPLES = TensorDataset(values(12, 6, 3, seed=1), values(12, 6, 3, seed=2))


def train_attached(
    comm: Communicator,
    places: tuple[int, ...],
    run_dir: Path | None,
    num_epochs: int = 2,
    policy: allstep.ExchangePolicy | None = None,
    frozen_first: str = "",
) -> dict[str, Tensor]:
    """Two copies where the ranks suffice; clipped by the norm of the whole model.

    A part may be frozen in the first epoch.
    """
    num_ranks = max(places) + 1
    mesh = comm.mesh(data=comm.size // num_ranks, model=num_ranks)
    options = {"inputs": ("x", "y0"), "outputs": ("y", "z"), "seeded": seeded_thread}
    chain = Chain(parts(places), mesh, **options)
    optimizer = torch.optim.AdamW(chain.parameters(), lr=0.02)
    exchange = allstep.attach(chain, mesh["data"], policy)
    loader = allstep.data.loader(SAMPLES, mesh["data"], global_batch=6, micro_batch=2)
    state = {"optimizer": optimizer}
    with allstep.AutoCheckpoint(run_dir, loader, exchange, state=state) as checkpoint:
        for epoch in checkpoint.epochs(num_epochs):
            if frozen_first in chain.parts:
                chain.parts[frozen_first].requires_grad_(epoch > 0)
            for batch in allstep.steps(loader, exchange, checkpoint=checkpoint):
                for x, y0 in batch:
                    found, delegate = chain(x=x, y0=y0)
                    losses = [found["y"].square().mean(), found["z"].mean()] if found else []
                    batch.backward(sum(losses, delegate))
                exchange.clip_grad_norm_(0.1)
                optimizer.step()
                optimizer.zero_grad()
    return {name: p.detach() for name, p in chain.named_parameters()}


@pytest.mark.parametrize(
    ("size", "places"), [(1, (0, 0, 0)), (2, (1, 0, 0)), (3, (1, 2, 0)), (4, (1, 0, 1))]
)
def test_chain_goes_on_wherever_its_parts_lie(size, places, tmp_path, thread_generators):  # noqa: F811
    """From a checkpoint of three ranks, with the optimizer's state of each part."""

    def lives(size: int, places: tuple[int, ...], *options: Any) -> dict[str, Tensor]:
        def life(comm: Communicator) -> dict[str, Tensor]:
            return train_attached(comm, places, *options)

        return merged(run_ranks(size, life))

    whole = lives(1, (0, 0, 0), None)
    lives(3, (2, 0, 1), tmp_path, 1)
    assert largest_difference(lives(size, places, tmp_path), whole) < 1e-10
    assert largest_difference(lives(1, (0, 0, 0), None, 1), whole) > 1e-3


def test_chain_goes_on_with_errors_of_what_was_trained(tmp_path, thread_generators):  # noqa: F811
    """A format's error feedback is of the parts that were not frozen when the life ended."""

    def life(run_dir: Path, num_epochs: int) -> dict[str, Tensor]:
        policy = allstep.Synchronous(compression="powersgd", bucket_bytes=256)
        options = ((1, 0, 1), run_dir, num_epochs, policy, "encoder")
        return merged(run_ranks(4, lambda comm: train_attached(comm, *options)))

    whole = life(tmp_path / "whole", 2)
    life(tmp_path / "lives", 1)
    assert not differing_names(life(tmp_path / "lives", 2), whole)


@pytest.mark.parametrize("places", [(0, 0, 0), (1, 0, 1)])
def test_chain_of_exact_sums_has_the_same_bits_on_any_number_of_copies(places, thread_generators):  # noqa: F811
    """One copy of one rank or of two, two and three; the control's float sums differ."""

    def bits(num_copies: int, places: tuple[int, ...], compression: str) -> dict[str, Tensor]:
        policy = allstep.Synchronous(compression=compression)
        size = num_copies * (max(places) + 1)
        return merged(run_ranks(size, lambda comm: train_attached(comm, places, None, 2, policy)))

    one = bits(1, (0, 0, 0), "exact")
    for num_copies in (1, 2, 3):
        assert not differing_names(bits(num_copies, places, "exact"), one), num_copies
    assert differing_names(bits(2, places, "fp32"), bits(1, places, "fp32"))


class Beside(nn.Module):
    """A scale that all ranks use, and a head that the last one does, beside a chain."""

    def __init__(self, chain: Chain) -> None:
        super().__init__()
        self.chain = chain
        self.scale = nn.Parameter(values(2, seed=8))
        self.head = with_weights(nn.Linear(2, 2), 9)

    def forward(self, x: Tensor) -> Tensor:
        (scale,) = replicated(self.chain.parts.comm, [self.scale])
        found, delegate = self.chain(x=x)
        loss = delegate + 0 * scale.sum()
        return loss + self.head(found["y"] * scale).square().mean() if found else loss


@pytest.mark.parametrize("compression", ["fp32", "exact"])
def test_chain_is_clipped_with_what_lies_beside_it(compression):
    """Once, however many ranks have it."""

    def clipped(comm: Communicator) -> tuple[float, dict[str, Tensor]]:
        last = comm.size - 1
        first = ChainPart("a", lambda: with_weights(nn.Linear(3, 4), 1), 0, ("x",), ("h",))
        second = ChainPart("b", lambda: with_weights(nn.Linear(4, 2), 2), last, ("h",), ("y",))
        model = Beside(chain_on(comm, [first, second]))
        mesh = model.chain.parts.mesh
        policy = allstep.Synchronous(compression=compression)
        exchange = allstep.attach(model, mesh["data"], policy)
        model(values(5, 3, seed=0)).backward()
        norm = exchange.clip_grad_norm_(0.1)
        return float(norm), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    [(norm, gradients)] = run_ranks(1, clipped)
    for size in (2, 3):
        found = run_ranks(size, clipped)
        assert [norm for norm, _ in found] == pytest.approx([norm] * size, rel=0, abs=1e-10)
        assert largest_difference(merged([of for _, of in found]), gradients) < 1e-10


class Rounded(nn.Module):
    """Products of bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(values(2, 2, seed=4).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16() @ self.weight


class Halves(nn.Module):
    """A complex matrix and its product with real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.complex(values(3, 4, seed=1), values(3, 4, seed=2)))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight).abs()


def test_chain_is_clipped_whose_parts_have_unlike_numbers():
    """Complex ones on one rank, bfloat16 on another: the norm is real, and the same on all."""

    def clipped(comm: Communicator) -> Tensor:
        last = comm.size - 1
        parts = [
            ChainPart("a", Halves, 0, ("x",), ("h",)),
            ChainPart("b", lambda: with_weights(nn.Linear(4, 2), 2), 0, ("h",), ("z",)),
            ChainPart("c", Rounded, last, ("z",), ("y",)),
        ]
        chain = chain_on(comm, parts)
        exchange = allstep.attach(chain, chain.parts.mesh["data"])
        found, delegate = chain(x=values(5, 3, seed=0))
        (found["y"].square().mean() + delegate if found else delegate).backward()
        return exchange.clip_grad_norm_(0.1)

    [norm] = run_ranks(1, clipped)
    found = run_ranks(2, clipped)
    assert [x.dtype for x in (norm, *found)] == [torch.float64, torch.float64, torch.float32]
    torch.testing.assert_close(found[0], norm, rtol=0, atol=1e-10)
    torch.testing.assert_close(found[1], norm.float(), rtol=1e-6, atol=0)


def test_chain_does_not_go_on_from_other_widths(tmp_path):
    """Which one of the ranks has; both say so."""

    def chain(comm: Communicator, width: int, rank: int) -> Chain:
        second = ChainPart("b", lambda: nn.Linear(4, width), rank, ("h",), ("y",))
        return chain_on(comm, [ChainPart("a", nn.Linear(3, 4), 0, ("x",), ("h",)), second])

    save_whole(chain(Communicator.single_process(), 5, 0), tmp_path)

    def refused(comm: Communicator) -> str:
        model = chain(comm, 7, 1)
        return misfit(model, model.parts.mesh["data"], tmp_path)

    for said in run_ranks(2, refused):
        assert "another shape: parts.b.weight [5, 4] instead of [7, 4], parts.b.bias [5]" in said


def test_chain_is_not_attached_to_all_workers():
    def work(comm: Communicator) -> None:
        chain = chain_on(comm, [ChainPart("a", nn.Linear(2, 2), 0, ("x",), ("y",))])
        with pytest.raises(UsageError, match=r"attach it to mesh\['data'\]"):
            allstep.attach(chain, comm)

    run_ranks(2, work)


def test_chain_backward_reaches_values_that_are_not_used():
    """The sender waits for a gradient, and gets zeros."""

    def work(comm: Communicator) -> Tensor | None:
        encoder = with_weights(nn.Linear(3, 2), 1)
        last = ChainPart("b", nn.Identity(), 1, ("h",), ("y",))
        chain = chain_on(comm, [ChainPart("a", encoder, 0, ("x",), ("h",)), last])
        _, delegate = chain(x=values(4, 3, seed=0))
        delegate.backward()
        return encoder.weight.grad

    grad, none = run_ranks(2, work)
    assert grad is not None and not grad.any() and none is None


def graph(*parts: tuple[str, int, tuple[str, ...], tuple[str, ...]], outputs=("y",)) -> Chain:
    made = [
        ChainPart(name, nn.Identity(), rank, inputs, outs) for name, rank, inputs, outs in parts
    ]
    return chain_on(Communicator.single_process(), made, outputs=outputs)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            [("a", 0, ("x", "v"), ("u",)), ("b", 0, ("u",), ("v", "y"))],
            "Parts wait for each other in a circle: `a` -> `b` -> `a`",
        ),
        ([("a", 0, ("x",), ("y", "u"))], "Value `u` is made and never taken"),
        ([("a", 0, (), ("y",))], "Value `x` is made and never taken"),
        ([("a", 0, ("x", "u"), ("y",))], "Value `u` is taken and never made"),
        ([("a", 0, ("x",), ("u",)), ("b", 0, ("u",), ())], "Value `y` is taken and never made"),
        ([("a", 0, ("x",), ("y",)), ("b", 0, ("x",), ("y",))], "Value `y` is made twice"),
        ([("a", 1, ("x",), ("y",))], "Part `a` is on rank 1; choose one of 0 to 0"),
        ([("a.b", 0, ("x",), ("y",))], "`parts` has the name 'a.b'"),
    ],
)
def test_chain_refuses_a_graph_before_anything_runs(parts, message):
    with pytest.raises(UsageError, match=message):
        graph(*parts)


@pytest.mark.parametrize(("is_made", "last"), [(False, 1), (True, 0), (True, 1)])
def test_chain_of_parts_that_share_a_parameter(is_made, last):
    """On several workers each copy would have a part of the gradient; if made, refused on one."""
    tied = [nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3))]
    tied[1][0].weight = tied[0].weight
    a, c = [(lambda m=m: m) if is_made else m for m in tied]

    def work(comm: Communicator) -> None:
        middle = ChainPart("b", nn.Tanh(), last, ("h",), ("z",))
        rank = 0 if is_made else last  # a function is called on its rank alone
        ends = [ChainPart("a", a, 0, ("x",), ("h",)), ChainPart("c", c, rank, ("z",), ("y",))]
        error = DisagreementError if is_made and comm.rank > 0 else UsageError
        with pytest.raises(error, match=r"`0\.weight` of part `c` is also a parameter of part `a`"):
            chain_on(comm, [ends[0], middle, ends[1]])

    run_ranks(last + 1, work)


def test_chain_of_parts_that_share_a_parameter_on_their_rank():
    """As an embedding and what gives its words again, with parts of other ranks between them."""
    x, weight = torch.arange(6.0).view(2, 3) / 6, torch.eye(3) / 2 + 0.1
    expected = weight.clone().requires_grad_()
    (torch.tanh(x @ expected.T) @ expected.T).square().sum().backward()

    def work(comm: Communicator) -> Tensor | None:
        tied = [nn.Linear(3, 3, bias=False) for _ in range(2)]
        tied[1].weight = tied[0].weight = nn.Parameter(weight.clone())
        ends = [
            ChainPart("a", tied[0], 0, ("x",), ("h",)),
            ChainPart("c", tied[1], 0, ("z",), ("y",)),
        ]
        middle = ChainPart("b", nn.Tanh(), comm.size - 1, ("h",), ("z",))
        values, delegate = chain_on(comm, [ends[0], middle, ends[1]])(x=x)
        (sum(y.square().sum() for y in values.values()) + delegate).backward()
        return tied[0].weight.grad

    for size in (1, 2):
        torch.testing.assert_close(run_ranks(size, work)[0], expected.grad)


def test_chain_of_what_is_no_mesh_no_rank_and_no_module():
    comm = Communicator.single_process()

    def part(rank=0, make=nn.Identity):
        return ChainPart("a", make, rank, ("x",), ("y",))

    with pytest.raises(UsageError, match=r"`mesh` \(a Communicator\) must be a Mesh: `comm.mesh\("):
        Chain([part()], comm, inputs=("x",), outputs=("y",))
    with pytest.raises(UsageError, match="Part `a` is on rank None; choose one of 0 to 0"):
        chain_on(comm, [part(rank=None)])
    with pytest.raises(UsageError, match="`parts`: what makes part `a` returned None; return"):
        chain_on(comm, [part(make=lambda: None)])


def test_chain_input_that_is_not_given():
    with pytest.raises(UsageError, match="`x` is not given, and a part on rank 0 takes it"):
        graph(("a", 0, ("x",), ("y",)))()


def test_chain_part_that_returns_too_little():
    chain = graph(("a", 0, ("x",), ("y", "z")), outputs=("y", "z"))
    with pytest.raises(UsageError, match=r"Part `a` returned a Tensor; it has outputs \('y', 'z'"):
        chain(x=torch.ones(2))


def test_chain_that_workers_describe_otherwise():
    def work(comm: Communicator) -> None:
        part = ChainPart("a", nn.Identity(), comm.rank, ("x",), ("y",))
        chain_on(comm, [part])

    with pytest.raises(DisagreementError, match=r"`a` is 0 .* on rank 0; 1 .* on rank 1"):
        run_ranks(2, work)
