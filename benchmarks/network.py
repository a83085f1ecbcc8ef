"""Runs ranks on one machine: as processes of one host, or on hosts with slow links."""

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from allstep import doctor
from allstep.doctor import UnavailableError

__all__ = ["KEPT_MEMORY", "ShapedHosts", "UnavailableError", "run_on_one_host"]

Variables = Mapping[str, object]

# By itself glibc gives the memory of large tensors back at each step, or keeps it, by chance: the
# same steps take 49 or 100 ms.
KEPT_MEMORY: Variables = {"MALLOC_MMAP_THRESHOLD_": 1 << 32, "MALLOC_TRIM_THRESHOLD_": 1 << 34}

_POLL_S = 0.05
_ONE_CORE: Variables = {"OMP_NUM_THREADS": 1, "MKL_NUM_THREADS": 1}  # for each rank


class ShapedHosts(doctor.ShapedHosts):
    """Hosts with slow links that run a command and wait for it."""

    def run(
        self, command: Sequence[object], *, timeout_s: float, variables: Variables | None = None
    ) -> None:
        """Runs a command on every host at once, as rank i of as many, as torchrun would.

        Args:
            command: its words.
            timeout_s: for all of it.
            variables: of its environment, besides this process's.

        Raises:
            RuntimeError: with the end of what a rank said, if it failed or took too long.
        """
        commands = self.commands(
            [str(word) for word in command], {**_ONE_CORE, **(variables or {})}
        )
        _run_all(commands, [dict(os.environ)] * len(commands), timeout_s)


def run_on_one_host(
    num_ranks: int,
    command: Sequence[object],
    *,
    timeout_s: float,
    variables: Variables | None = None,
) -> None:
    """Runs a command as every rank of this host at once, as torchrun would.

    Args:
        num_ranks: how many.
        command, timeout_s, variables: as of `ShapedHosts.run`.

    Raises:
        RuntimeError: with the end of what a rank said, if it failed or took too long.
    """
    environments = []
    for rank in range(num_ranks):
        place = {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
        place |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": num_ranks}
        environments.append(_environment(rank, num_ranks, {**place, **(variables or {})}))
    _run_all([[str(word) for word in command]] * num_ranks, environments, timeout_s)


def _environment(rank: int, size: int, variables: Variables) -> dict[str, str]:
    common = {"RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": 29_400 + os.getpid() % 500}
    all_of_them = {**common, **_ONE_CORE, **variables}
    return os.environ | {name: str(value) for name, value in all_of_them.items()}


def _run_all(
    commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]], timeout_s: float
) -> None:
    """Runs the commands side by side; ends the others when one fails."""
    deadline_s = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{rank}.log" for rank in range(len(commands))]
        processes = []
        try:
            for command, environment, log in zip(commands, environments, logs, strict=True):
                with log.open("w") as output:
                    processes.append(
                        subprocess.Popen(command, env=environment, stdout=output, stderr=output)
                    )
            while None in (codes := [process.poll() for process in processes]):
                if any(codes) or time.monotonic() > deadline_s:
                    break
                time.sleep(_POLL_S)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for rank, code in enumerate(codes):
            if code:
                raise RuntimeError(
                    f"rank {rank} ended with {code}:\n{logs[rank].read_text()[-4000:]}"
                )
        if None in codes:
            raise RuntimeError(
                f"ranks took longer than {timeout_s:g} s:\n{logs[0].read_text()[-4000:]}"
            )
