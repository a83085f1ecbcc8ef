"""After `close` nothing of a group is left that could disturb the end of the process."""

import textwrap

import pytest

from tests.helpers.launched import Launched
from tests.helpers.ports import free_port

pytestmark = pytest.mark.process

SCRIPT = textwrap.dedent("""
    import os
    import time
    import torch
    import allstep

    comm = allstep.init(device="cpu")
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()  # imports much of torch
    comm.all_reduce(torch.ones(1))
    comm.close()

    def num_threads():
        places = [f"/proc/self/task/{task}/comm" for task in os.listdir("/proc/self/task")]
        return sum("gloo" in open(place).read() for place in places if os.path.exists(place))

    deadline_s = time.monotonic() + 5
    while num_threads() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    print(f"gloo threads: {num_threads()};", flush=True)
""")


def test_close_ends_backend_threads(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    runs = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        runs.append(Launched("script.py", cwd=tmp_path))
    for run in runs:
        run.finish(within_s=60.0)
        assert run.code == 0, run.errors
        assert run.output == "gloo threads: 0;\n"
