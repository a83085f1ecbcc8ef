"""Readings of a host's GPUs for `allstep doctor`: products, copies, counters; without torch.

[Note: GPUs in a process of their own] On some boards a copy from one GPU to another never ends, in
the driver, where only SIGKILL helps. So another process measures. It says each time what it does
next and how long that may take, in lines of JSON, and is killed when it falls silent.
"""

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

_COMMAND = (sys.executable, "-m", "allstep.cli.measure_gpus")
_START_S = 120.0  # of CUDA on a host with many GPUs
_DEVICES = ("/dev/nvidiactl", "/dev/kfd")  # of NVIDIA's driver and AMD's


def has_gpus() -> bool:
    """Whether this host has a GPU driver."""
    return any(Path(device).exists() for device in _DEVICES)


def probe_gpus(command: Sequence[str] = _COMMAND) -> dict[str, Any]:
    """Readings of this host's GPUs, as plain data.

    Args:
        command: measures them.

    Returns:
        driver, nccl: their versions, where there are any; gpus: of each what `measure_gpus` says;
        wrong_copies: [from, to, what arrived]; stuck: what the command did last, if that did not
        end; error: its last words, if it failed; missing: what could not be looked at.
    """
    found: dict[str, Any] = {"driver": "", "nccl": "", "gpus": [], "wrong_copies": []}
    found |= {"stuck": "", "error": "", "missing": ""}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    lines: queue.Queue[str | None] = queue.Queue()
    reading = threading.Thread(target=_read_lines, args=(process.stdout, lines), daemon=True)
    reading.start()
    doing, limit_s, last = "start", _START_S, ""
    try:
        while (line := lines.get(timeout=limit_s)) is not None:
            if not line.startswith("{"):
                last = line.strip() or last
                continue
            said = json.loads(line)
            doing, limit_s = said.pop("doing", doing), said.pop("limit_s", limit_s)
            for name, value in said.items():
                found[name] = [*found[name], value] if name in ("gpus", "wrong_copies") else value
    except queue.Empty:
        found["stuck"] = doing
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # in the driver it may not even die
        process.wait(2.0)
    reading.join(2.0)
    if not found["stuck"] and process.returncode and doing != "end":
        found["error"] = f"{doing}: {last}"
    return found


def _read_lines(stream: IO[str], lines: "queue.Queue[str | None]") -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)
