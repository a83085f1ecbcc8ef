"""`Communicator`: a group of workers and its collectives."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from allstep.comm.codec import decode, encode
from allstep.comm.collectives import TensorCollectives
from allstep.comm.failures import loss_told_by_torch
from allstep.comm.group import Topology
from allstep.comm.last_state import LastState
from allstep.comm.mesh import Mesh
from allstep.comm.objects import ObjectCollectives
from allstep.comm.reductions import Reductions
from allstep.comm.wire import SingleProcessWire, Wire
from allstep.comm.work import check_timeout
from allstep.comm.worker_state import WELL
from allstep.errors import UsageError


class Communicator(Reductions, TensorCollectives, ObjectCollectives):
    """One worker's handle of a group of workers; made by `init`, `split` or `single_process`.

    Every rank must make the same calls in the same order. Every wait ends after `timeout_s`
    with CollectiveTimeoutError, or at once with PeerLostError when another rank failed. This does
    not hold for sums and equal-sized exchanges of GPU tensors whose shapes were compared before:
    the host doesn't wait for them, and if a rank is missing, NCCL ends the others' processes.

    Attributes:
        rank, size: this worker's number, and the number of workers.
        local_rank, local_size: the same among the workers of this node.
        node_rank, num_nodes: this node's number, and the number of nodes.
        device: the device that this worker computes on; received tensors are on it.
        timeout_s: largest duration of a call.
        process_group: the underlying process group of torch; None for a single process.

    >>> with Communicator.single_process() as comm:
    ...     comm.all_gather(torch.ones(2))
    (tensor([1., 1.]),)
    """

    _last_state: LastState | None = None

    @classmethod
    def single_process(
        cls, device: torch.device | str = "cpu", timeout_s: float = 300.0
    ) -> "Communicator":
        """The communicator of a single worker; needs no server."""
        check_timeout(timeout_s)
        return cls(SingleProcessWire(timeout_s), Topology(0, 1, 0, 1), torch.device(device))

    def become(self, wire: Wire, topology: Topology) -> None:
        super().become(wire, topology)
        if self._last_state is not None:
            self._last_state.move(wire.names.number, wire.names.size, wire.names.placed)

    def keep_last_state(
        self, run_dir: Path | str, *, notice_s: float = 5.0, waits: bool = False
    ) -> AbstractContextManager[object]:
        """Keeps a file of this worker's activity in a run's folder, which `allstep why` reads.

        The file records how the worker ended when the communicator is closed, or when the returned
        context manager exits. If a file is kept already, nothing is done. See [Note: last state].

        Args:
            run_dir: the run's folder; made if missing.
            notice_s: seconds of waiting for others after which to log it; then doubled each time.
            waits: whether this worker waits to join others: the file begins when it has a rank.
        """
        if self.activity.on_end is not None:
            return nullcontext()
        names = self.wire.names
        number, size = (-1, 0) if waits else (names.number, names.size)
        self._last_state = LastState(
            run_dir, self.activity, number, size, names.placed, notice_s=notice_s
        ).start()
        return self._last_state

    def __deepcopy__(self, memo: dict[int, object]) -> "Communicator":
        return self  # a copied module keeps the communicator

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        flag = torch.zeros(1, device=self.messages.device)
        self.wire.all_reduce(flag, dist.ReduceOp.SUM, "barrier").wait()
        flag.item()  # on CUDA only the stream waits above

    def split(self, color: int | None, key: int = 0) -> "Communicator | None":
        """Divides the workers into groups, as MPI_Comm_split does; all of them must call it.

        Errors of a call in a new group name its ranks by their numbers in the group that `init`
        made.

        Args:
            color: workers of equal color form a group; None for a worker that joins none.
            key: orders the ranks of the new group; equal keys are ordered by rank in this group.

        Returns:
            The new group's communicator, or None if `color` is None.

        >>> Communicator.single_process().split(color=0).size
        1
        """
        for name, value in (("color", color), ("key", key)):
            if not isinstance(value, int) and not (name == "color" and value is None):
                raise UsageError(f"`{name}` (={value!r}) must be an int.")
        color = None if color is None else int(color)  # True equals 1 on other workers, too
        self.wire.names.withdraw_report()
        group_id = self.wire.new_group_id() if self.rank == 0 else 0
        message = encode((color, key, self.node_rank, group_id))
        entries = [decode(other) for other in self.messages.all_gather(message, "split")]
        if color is None:
            return None
        ranks = [rank for rank in range(self.size) if entries[rank][0] == color]
        ranks.sort(key=lambda rank: entries[rank][1])
        wire = self.wire.split(f"{entries[0][3]}/{color}", ranks, self.device)
        topology = Topology.from_nodes([entries[rank][2] for rank in ranks], wire.rank)
        new = Communicator(wire, topology, self.device)
        self.add_dependent(new)
        new.barrier()  # a worker that left at once would stop the others' connecting
        new.wire.names.last_call = "split"
        return new

    def mesh(self, **axes: int) -> "Mesh[Communicator]":
        """Arranges the workers along named axes; all of them must call it.

        Attach a model that is divided over the other axes to the data axis,
        `attach(model, mesh["data"])`: each parameter's gradient is the mean over the workers that
        hold the parameter.

        Args:
            axes: name -> length, slowest axis first; their product is `size`.

        Returns:
            The mesh; `mesh[name]` is the communicator along an axis.

        Raises:
            UsageError: if the axes don't multiply to the number of workers.
            DisagreementError: if the axes differ between workers.

        >>> mesh = Communicator.single_process().mesh(data=1, model=1)
        >>> mesh["data"].size, mesh.coordinates
        (1, {'data': 0, 'model': 0})
        """
        return Mesh(self, axes, self.split)

    def set_timeout(self, timeout_s: float) -> None:
        """Sets the timeout of all following calls, in this group and those split off.

        Args:
            timeout_s: seconds; must be the same on all ranks.

        Raises:
            UsageError: if it isn't a positive number.
        """
        check_timeout(timeout_s)
        self.timeout_s = self.wire.timeout_s = timeout_s
        for dependent in self._alive_dependents:
            if isinstance(dependent, Communicator):
                dependent.set_timeout(timeout_s)

    def close(self) -> None:
        """Leaves the group; destroys what `init` or `split` made, never a framework's own group."""
        if self._last_state is not None:
            self._last_state.end(WELL)
        self._close_algorithms()
        self.wire.close(abort=False)

    def abort(self) -> None:
        """Leaves this group and those split off, so that ranks waiting for this one fail fast."""
        for dependent in self._alive_dependents:
            dependent.abort()
        self.wire.close(abort=True)

    def interrupt(self) -> None:
        """Makes waiting calls fail, also in groups that were split off; from any thread."""
        for dependent in self._alive_dependents:
            if isinstance(dependent, Communicator):
                dependent.interrupt()
        self.wire.interrupt()

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if error is None:
            self.close()
            return
        lost = loss_told_by_torch(error, self.wire.names)
        if self._last_state is not None:
            self._last_state.fail(lost or error)
        self.abort()
        if lost is not None:
            raise lost from error

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, size={self.size}, device={self.device})"
