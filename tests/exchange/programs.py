"""Short programs of a training, run on workers and, as the oracle, by one process on whole batches.

A program is a list of segments, each of some number of workers, with a checkpoint between them; a
segment is a list of `(operation, arguments)`. The oracle is plain torch, in float64.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator
from allstep.exchange import ExchangePolicy
from allstep.train.storage import Stored, in_memory
from tests.helpers.ranks import run_ranks

WIDTH, ROWS, MICRO_BATCH, NUM_BATCHES = 3, 12, 3, 60
_FORWARD = ("train", "evaluate", "attach_again")  # operations that take up what has joined
Operation = tuple[str, dict[str, Any]]


@dataclass
class Program:
    """What is done, in which kind of loop.

    Attributes:
        policy: of the exchange.
        in_steps: global batches of `allstep.steps`, or else a loop of one's own.
        segments: (number of workers, operations).
    """

    policy: ExchangePolicy
    in_steps: bool
    segments: list[tuple[int, list[Operation]]] = field(default_factory=list)

    def __str__(self) -> str:
        loop = "steps" if self.in_steps else "own loop"
        lines = [f"{self.policy}, {loop}"]
        for size, operations in self.segments:
            lines += [f"on {size}:", *(f"    {name} {args}" for name, args in operations)]
        return "\n".join(lines)


class Net(nn.Module):
    """Residual layers that can be left out for some rows, and a head."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(new_layer, range(num_layers)))
        self.head = new_layer(-1)

    def forward(self, x: Tensor, skipped: int | None = None) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index != skipped:
                x = x + torch.tanh(layer(x))
        return self.head(x)[:, 0]


def new_layer(index: int) -> nn.Linear:
    """Layer `index`, whenever and wherever it is made."""
    generator = torch.Generator().manual_seed(index + 100)
    layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)
    return layer


def rows_of(batch: int) -> tuple[Tensor, Tensor]:
    """The samples of a global batch."""
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randn(ROWS, generator=generator, dtype=torch.float64)


def sum_of_losses(net: Net, rows: range, batch: int, args: dict[str, Any]) -> Tensor:
    """Over some rows of a batch, of which the first few leave a layer out."""
    x, y = rows_of(batch)
    total = torch.zeros((), dtype=torch.float64)
    cut = min(max(args["num_skipping"], rows.start), rows.stop)
    for part, skipped in ((slice(rows.start, cut), args["skipped"]), (slice(cut, rows.stop), None)):
        if part.start < part.stop:
            total = total + (net(x[part], skipped) - y[part]).square().sum()
    return total


class Oracle:
    """One process, whole batches, plain torch; knows what is late and what is frozen."""

    def __init__(self, staleness: int) -> None:
        self.net, self._staleness, self._batch = Net(2), staleness, 0
        self._optimizer = new_optimizer(self.net, 2)
        self._made: list[dict[nn.Parameter, Tensor]] = []

    def run(self, operations: list[Operation]) -> list[dict[str, Tensor]]:
        """The parameters after each operation."""
        found = []
        for name, args in operations:
            getattr(self, f"_{name}")(**args)
            found.append(copy.deepcopy(self.net.state_dict()))
        self._state()
        return found

    def _train(self, passes: int = 1, **args: Any) -> None:
        trained = [p for p in self.net.parameters() if p.requires_grad]
        gradients: dict[nn.Parameter, Tensor] = {}
        for at in range(passes):
            loss = sum_of_losses(self.net, range(ROWS), self._batch + at, args) / ROWS
            for p, g in zip(
                trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True
            ):
                if g is not None:
                    gradients[p] = gradients.get(p, 0) + g
        self._batch += passes
        self._drop_frozen()
        self._made.append(gradients)
        if len(self._made) > self._staleness:
            self._update(self._made.pop(0))

    def _update(self, gradients: dict[nn.Parameter, Tensor]) -> None:
        for p, gradient in gradients.items():
            if p.requires_grad:
                p.grad = gradient
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _flush(self) -> None:
        while self._made:
            self._update(self._made.pop(0))

    def _set_trained(self, layer: int, trained: bool) -> None:
        self.net.layers[layer].requires_grad_(trained)

    def _append(self) -> None:
        append(self.net, self._optimizer)

    def _attach_again(self) -> None:
        self._flush()

    def _drop_frozen(self) -> None:
        """What was made before a freeze is not applied after it."""
        self._made = [{p: g for p, g in made.items() if p.requires_grad} for made in self._made]

    _state = _evaluate = _drop_frozen

    def _talk(self, number: int) -> None:
        """Changes nothing."""


def append(net: Net, optimizer: torch.optim.Optimizer) -> None:
    layer = new_layer(len(net.layers))
    net.layers.append(layer)
    optimizer.add_param_group({"params": list(layer.parameters())})


def new_optimizer(net: Net, num_layers: int) -> torch.optim.Optimizer:
    """With a group for each layer but the first two, as if they had come later."""
    first = [*net.head.parameters(), *net.layers[:num_layers].parameters()]
    later = [list(layer.parameters()) for layer in net.layers[num_layers:]]
    groups = [{"params": params} for params in (first, *later)]
    return torch.optim.SGD(groups, lr=0.02, momentum=0.9)


class Worker:
    """One of the workers of a segment."""

    def __init__(self, comm: Communicator, program: Program, saved: Stored | None) -> None:
        self._comm, self._program = comm, program
        state = None if saved is None else copy.deepcopy(saved.unpack())
        self.net = Net(2 if state is None else state["num_layers"])
        for index in [] if state is None else state["frozen"]:
            self.net.layers[index].requires_grad_(False)
        self._optimizer = new_optimizer(self.net, 2)
        self._exchange = allstep.attach(self.net, comm, program.policy)
        self._loader = allstep.data.loader(
            TensorDataset(torch.arange(ROWS * NUM_BATCHES)),
            comm,
            global_batch=ROWS,
            micro_batch=MICRO_BATCH,
            shuffle=False,
        )
        self._batch = 0
        if state is not None:
            self._batch = state["batch"]
            self.net.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
            self._exchange.load_state_dict(state["exchange"])
            self._loader.load_state_dict(state["loader"])
        self._batches = allstep.steps(self._loader, self._exchange)

    def run(self, operations: list[Operation]) -> tuple[list[dict[str, Tensor]], Stored]:
        """The parameters after each operation, and a checkpoint at the end."""
        found = []
        for name, args in operations:
            getattr(self, f"_{name}")(**args)
            found.append(copy.deepcopy(self.net.state_dict()))
        saved = self._state()
        self._loader.close()
        self._exchange.detach()
        return found, saved

    def _train(self, passes: int = 1, **args: Any) -> None:
        for _ in range(passes):
            if self._program.in_steps:
                self._train_in_steps(args)
            else:
                self._train_in_own_loop(args)
            self._batch += 1
        self._update()

    def _train_in_steps(self, args: dict[str, Any]) -> None:
        batch = next(self._batches)
        for (indices,) in batch:
            first = int(indices[0]) % ROWS
            rows = range(first, first + len(indices))
            batch.backward(sum_of_losses(self.net, rows, self._batch, args) / len(rows))

    def _train_in_own_loop(self, args: dict[str, Any]) -> None:
        comm = self._comm
        if self._program.policy.reduction == "mean":
            rows = range(comm.rank * ROWS // comm.size, (comm.rank + 1) * ROWS // comm.size)
            num_rows = len(rows)
        else:  # anyhow, also none
            ends = [0, *sorted(args["cuts"][: comm.size - 1]), ROWS]
            rows, num_rows = range(ends[comm.rank], ends[comm.rank + 1]), ROWS
        if args["in_parts"]:
            middle = (rows.start + rows.stop) // 2
            with self._exchange.no_sync():
                if middle > rows.start:
                    first = range(rows.start, middle)
                    (sum_of_losses(self.net, first, self._batch, args) / num_rows).backward()
            rows = range(middle, rows.stop)
        if not rows:
            self._exchange.synchronize()
            return
        (sum_of_losses(self.net, rows, self._batch, args) / num_rows).backward()

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _flush(self) -> None:
        for _ in self._exchange.flush():
            self._update()

    def _set_trained(self, layer: int, trained: bool) -> None:
        self.net.layers[layer].requires_grad_(trained)

    def _append(self) -> None:
        append(self.net, self._optimizer)
        with torch.no_grad():  # it will get rank 0's values
            self.net.layers[-1].weight.add_(self._comm.rank)

    def _attach_again(self) -> None:
        self._flush()
        self._exchange.detach()
        self._exchange = allstep.attach(self.net, self._comm, self._program.policy)
        self._batches.close()
        self._batches = allstep.steps(self._loader, self._exchange)

    def _evaluate(self) -> None:
        """Each worker some rows; the sum is that of all rows."""
        comm = self._comm
        self._exchange.sync_buffers()
        rows = range(comm.rank * ROWS // comm.size, (comm.rank + 1) * ROWS // comm.size)
        everything = {"num_skipping": 0, "skipped": None}
        with torch.no_grad():
            total = comm.all_reduce(sum_of_losses(self.net, rows, 0, everything))
            expected = sum_of_losses(self.net, range(ROWS), 0, everything)
        torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-9)

    def _talk(self, number: int) -> None:
        """Collectives between an exchange and the next."""
        comm = self._comm
        total = comm.all_reduce(torch.full((3,), float(number + comm.rank)))
        assert total.tolist() == [sum(range(number, number + comm.size))] * 3
        root = number % comm.size
        assert comm.broadcast_object(("from", comm.rank), root=root) == ("from", root)
        assert comm.all_gather_object(comm.rank) == list(range(comm.size))
        comm.barrier()

    def _state(self) -> Stored:
        frozen = [i for i, x in enumerate(self.net.layers) if not x.weight.requires_grad]
        return in_memory(
            {
                "num_layers": len(self.net.layers),
                "frozen": frozen,
                "batch": self._batch,
                "model": self.net.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "exchange": self._exchange.state_dict(),
                "loader": self._loader.state_dict(),
            },
        )


def check(program: Program) -> None:
    """Runs a program on its workers and by the oracle, and compares all parameters."""
    oracle, saved = Oracle(program.policy.staleness), None
    for size, operations in program.segments:
        expected = oracle.run(operations)

        def run(
            comm: Communicator, operations: list[Operation] = operations, saved: Any = saved
        ) -> Any:
            return Worker(comm, program, saved).run(operations)

        ranks = run_ranks(size, run)
        for rank, (found, _) in enumerate(ranks):
            is_new = False  # a layer that other ranks than 0 do not know yet
            for (name, args), state, wanted in zip(operations, found, expected, strict=True):
                is_new = name == "append" or (is_new and name not in _FORWARD)
                if rank and is_new:
                    continue
                for key, value in wanted.items():
                    torch.testing.assert_close(
                        state[key],
                        value,
                        rtol=1e-8,
                        atol=1e-8,
                        msg=lambda text, at=(rank, name, args, key): f"{at}: {text}",
                    )
        saved = ranks[0][1]
