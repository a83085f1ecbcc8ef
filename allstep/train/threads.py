"""How many threads a worker computes with, which is part of what an exact run is."""

import torch

from allstep.env import read_num_threads
from allstep.errors import CheckpointError


class Threads:
    """Keeps a run's number of threads while the run is there.

    [Note: threads] A worker's own products and sums have other last bits with another number of
    threads: gradients of convolutions, of some linear layers, of layer norms, of GELU where a
    thread's part ends; batch norm in the channels-last layout; sums over a whole tensor. So a run
    with exact sums keeps its number, on any number of workers and when it is resumed. It is what
    the option says, else `OMP_NUM_THREADS`, else one: a share of the cores would depend on the
    number of workers. Other runs, and those on a GPU, compute with as many as there are.

    Args:
        wanted: the option `threads`; None if it was left out.
        is_exact: whether the run's sums are.
        device: that the run computes on.
    """

    def __init__(self, wanted: int | None, *, is_exact: bool, device: torch.device) -> None:
        self._before = torch.get_num_threads()
        self._wanted = wanted
        self.num: int | None = wanted
        if wanted is None and is_exact and device.type == "cpu":
            self.num = read_num_threads() or 1
        self._set(self.num)

    def state_dict(self) -> dict[str, int | None]:
        return {"num": self.num}

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        """Goes on with the checkpoint's number.

        Raises:
            CheckpointError: if the option asks for another one.
        """
        if self.num is None or state["num"] is None:
            return
        if self._wanted not in (None, state["num"]):
            raise CheckpointError(
                f"`threads` (={self._wanted}) differs from the checkpoint's (={state['num']}): the"
                " run would not be the same to the last bit. Resume with the checkpoint's value."
            )
        self.num = state["num"]
        self._set(self.num)

    def give_back(self) -> None:
        """Lets the process compute as before."""
        self._set(self._before)

    def _set(self, num: int | None) -> None:
        if num not in (None, torch.get_num_threads()):
            torch.set_num_threads(num)
