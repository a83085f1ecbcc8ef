"""What all tests share: one thread each, no leaks, and a reason for every skip."""

import builtins
import gc
import os
import random
import shutil
from collections.abc import Generator, Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch.nn.attention import SDPBackend, sdpa_kernel

from allstep.exchange import optimizer_watch
from tests.helpers import generators
from tests.helpers.gpus import ON_CPU, on_cpu

# Ranks are threads or processes on few cores; more threads inside each only fight.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

collect_ignore = ["verify_scripts"]  # which import each other as a user's scripts do

settings.register_profile(
    "allstep", deadline=None, max_examples=25, derandomize=True, database=None
)
settings.register_profile(  # `make test-slow`
    "thorough", settings.get_profile("allstep"), max_examples=100
)
settings.load_profile("allstep")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle-seed", type=int, help="run the tests in a random order")
    parser.addoption("--gpu-tests-on-cpu", action="store_true", help="see tests/helpers/on_gpu.py")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("gpu_tests_on_cpu"):
        os.environ[ON_CPU] = "1"  # also of the processes that tests start


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps the garbage collector from what is imported and collected: it is there to the end.

    It would look through a million objects again and again, and at each `gc.collect` of a test.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("shuffle_seed")
    if seed is None:
        items[:] = _shared_out(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    else:
        random.Random(seed).shuffle(items)
    reasons = {"gpu": _no_gpu(), "net": _no_net()}
    for item in items:
        for marker, reason in reasons.items():
            if reason and marker in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))


def _shared_out(items: list[pytest.Item], num_shares: int) -> list[pytest.Item]:
    """An order in which each of xdist's workers gets its share of tests that wait for processes.

    It begins with them, so that none is left to wait for at the end.
    """
    slow = [item for item in items if "process" in item.keywords]
    quick = [item for item in items if "process" not in item.keywords]
    return [
        item
        for share in range(num_shares)
        for part in (slow, quick)
        for item in part[share * len(part) // num_shares : (share + 1) * len(part) // num_shares]
    ]


def _no_gpu() -> str | None:
    return None if on_cpu() or torch.cuda.is_available() else "needs CUDA"


def _no_net() -> str | None:
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "needs iproute2's ip and tc"
    return None if os.geteuid() == 0 else "needs root"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Without `_`, which a doctest leaves among the builtins that tyro looks through."""
    vars(builtins).pop("_", None)


@pytest.fixture(autouse=True, scope="session")
def _processes_are_forked_from_one_that_has_all(request: pytest.FixtureRequest) -> None:
    """Whichever test is the first to start one."""
    if any("process" in item.keywords for item in request.session.items):
        from tests.helpers.processes import start_forkserver  # imports much

        start_forkserver()


@pytest.fixture(autouse=True, scope="session")
def _each_rank_has_its_own_generator() -> Iterator[None]:
    with generators.own_generators():
        yield


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """What a test draws does not depend on the tests before it."""
    random.seed(0)
    np.random.seed(0)
    # `torch.manual_seed` writes down its callers for each kind of device that is not there.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def _default_dtype_does_not_leak() -> Iterator[None]:
    yield
    leaked = torch.get_default_dtype()
    if leaked != torch.float32:
        torch.set_default_dtype(torch.float32)
        pytest.fail(f"The test left torch's default dtype at {leaked}.")


@pytest.fixture(autouse=True)
def _attention_kernels_do_not_leak() -> Iterator[None]:
    """Ranks as threads choose some of the process's at once, and give back what they found."""
    with sdpa_kernel([kernel for kernel in SDPBackend.__members__.values() if kernel.value >= 0]):
        yield


@pytest.fixture(autouse=True)
def _nothing_is_attached() -> Iterator[None]:
    """What a test has left attached is none of the next one's optimizers' business."""
    yield
    optimizer_watch._here.exchanges.clear()
