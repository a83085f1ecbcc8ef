"""The number of threads that a worker computes with, which exact results depend on."""

import torch

from allstep.env import read_num_threads
from allstep.errors import CheckpointError


class Threads:
    """Sets a run's number of threads while the run exists.

    [Note: threads] A worker's own products and sums have other last bits with another number of
    threads: gradients of convolutions, of some linear layers, of layer norms, of GELU where a
    thread's part ends; batch norm in the channels-last layout; sums over a whole tensor. So a run
    with exact sums keeps its number, on any number of workers and when it is resumed. It is the
    option's value, else `OMP_NUM_THREADS`, else one: a share of the cores would depend on the
    number of workers. Other runs, and those on a GPU, use the process's present number.

    Args:
        wanted: the option `threads`; None if it was not given.
        is_exact: whether the run's sums are exact.
        device: the device that the run computes on.
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
        """Takes the checkpoint's number of threads.

        Raises:
            CheckpointError: if the option is set to another number.
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
        """Restores the process's earlier number of threads."""
        self._set(self._before)

    def _set(self, num: int | None) -> None:
        if num not in (None, torch.get_num_threads()):
            torch.set_num_threads(num)
