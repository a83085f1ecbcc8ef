"""After `close` nothing of a group is left that could disturb the end of the process."""

import textwrap

import pytest

from tests.helpers.launched import run_as_two_ranks

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
    for run in run_as_two_ranks(SCRIPT, tmp_path, monkeypatch, within_s=60.0):
        assert run.output == "gloo threads: 0;\n"


STILL_WAITS = textwrap.dedent("""
    import threading
    import time
    import allstep

    comm = allstep.init(device="cpu")
    threading.Thread(target=lambda: comm.recv(1 - comm.rank), daemon=True).start()
    while comm.activity.oldest_call() is None:
        time.sleep(0.01)
""")


def test_script_that_closes_nothing_ends_well_while_a_thread_waits(tmp_path, monkeypatch):
    run_as_two_ranks(STILL_WAITS, tmp_path, monkeypatch, within_s=60.0)
