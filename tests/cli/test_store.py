"""`allstep store`, and runs whose workers find each other in it."""

import math
import signal
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from allstep.cli import run_folder
from allstep.cli.exits import keeping_store, read_store
from allstep.cli.store import PORT, read_address
from allstep.errors import UsageError
from allstep.recipes.digits import Digits
from tests.helpers.joiners import answers, unreachable_store
from tests.helpers.launched import Launched
from tests.helpers.nemesis.disturb import Scene, disturb
from tests.helpers.nemesis.faults import Fault
from tests.helpers.nemesis.hosts import Host, two_hosts
from tests.helpers.ports import silent_port


@pytest.mark.parametrize("text", ["alpha", "alpha:", ":29400", "alpha:port", "alpha:70000", ""])
def test_no_address(text: str) -> None:
    with pytest.raises(UsageError, match=r"is no HOST:PORT, such as \w+:29400"):
        read_address(text)


@pytest.mark.parametrize("host", [".alpha", "alpha..net", 64 * "a"])
def test_a_name_that_no_host_can_have(host: str) -> None:
    with pytest.raises(UsageError, match=rf"no host has the name '{host}'; give HOST:PORT"):
        read_address(f"{host}:29400")


def test_nothing_answers() -> None:
    with (
        silent_port() as port,
        pytest.raises(UsageError, match=rf"start it there with `allstep store --port {port}`"),
    ):
        read_address(f"127.0.0.1:{port}")


@pytest.mark.parametrize("port", [-1, 70_000])
def test_a_port_that_there_is_not(port: int, refused: Callable[..., str]) -> None:
    assert f"`port` (={port})" in refused("store", f"--port={port}")


def test_a_port_that_is_taken(refused: Callable[..., str]) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"`port` (={port}) can't be listened on" in refused("store", "--port", str(port))


def test_a_run_that_is_not_elastic(tmp_path: Path, refused: Callable[..., str]) -> None:
    message = refused("train", "digits", "--store", "alpha:29400", "--run-dir", str(tmp_path / "r"))
    assert "`store` (=alpha:29400) needs `--elastic`" in message


def test_a_store_that_is_not_there(tmp_path: Path, refused: Callable[..., str]) -> None:
    """Before a folder is made."""
    with silent_port() as port:
        store = f"127.0.0.1:{port}"
        flags = ("--elastic", "--workers", "2", "--store", store, "--run-dir", str(tmp_path / "r"))
        assert f"`store` (={store!r}) does not answer" in refused("train", "digits", *flags)
        assert "does not answer" in refused("launch", *flags, "--", "-c", "pass")
    assert not (tmp_path / "r").exists()


def test_what_continues_the_run_names_the_store(tmp_path: Path) -> None:
    run_folder.write_recipe(tmp_path, Digits())
    run_folder.note_launch(tmp_path, elastic=True, store="alpha:29400")
    command = f"allstep train --resume {tmp_path} --elastic --store alpha:29400"
    assert run_folder.resume_command(tmp_path, 1) == command


def test_joining_where_the_store_is_gone(tmp_path: Path, refused: Callable[..., str]) -> None:
    """It is no launcher that can't be reached."""
    run_folder.write_recipe(tmp_path, Digits())
    with unreachable_store("alpha", is_apart=True) as record, keeping_store(tmp_path, record):
        assert read_store(tmp_path) == record
        assert "The store on alpha can't be reached" in refused("join", str(tmp_path))


@pytest.mark.process
def test_a_signal_ends_it() -> None:
    store = Launched("-m", "allstep", "store", "--port", 0)
    assert store.process.stdout is not None
    line = store.process.stdout.readline()
    assert line.startswith("serves elastic runs at ")
    read_address(f"127.0.0.1:{line.rpartition(':')[2].strip()}")
    store.process.send_signal(signal.SIGTERM)
    store.finish(within_s=60)
    assert (store.code, store.errors) == (143, "")


@pytest.mark.slow
@pytest.mark.net
def test_the_host_of_the_store_is_lost_without_a_word(tmp_path: Path) -> None:
    """Its workers train on, and do not wait at the end until the system gives up the connection."""
    disk, run_dir = tmp_path / "disk", tmp_path / "run"
    disk.mkdir()
    with two_hosts(disk) as (near, far):
        store = Launched("-m", "allstep", "store", on=partial(on, far))
        flags = ("--workers", 2, "--elastic", "--epochs", 3, "--run-dir", run_dir)
        address = f"{far.address}:{PORT}"
        with near.network():
            store.wait_until(lambda: answers(address))
        given = ("-m", "allstep", "train", "digits", *flags, "--store", address)
        training = Launched(*given, on=partial(on, near))
        training.wait_until(lambda: (run_dir / "metrics.jsonl").exists())
        disturb(Fault("drop", 0, 0, math.inf), Scene({}, [near, far], far, disk, disk))
        training.finish(within_s=200)
        assert training.code == 0, training.errors
        store.process.terminate()
        store.finish(within_s=60)


def on(host: Host, line: list[str]) -> list[str]:
    return ["ip", "netns", "exec", host.namespace, *line]
