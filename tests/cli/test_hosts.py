"""Workers on several hosts by one command: real ssh, real torchrun, hosts in namespaces."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from allstep.cli.hosts import Host, parse_hosts, split_host_options
from allstep.cli.main import main
from allstep.cli.probe_network import listening_socket
from allstep.cli.train import read_command_line
from allstep.errors import UsageError
from tests.helpers.compare import newest_tensors
from tests.helpers.named_hosts import NamedHosts, named_hosts
from tests.helpers.ssh_servers import ssh_servers

ROOT = Path(__file__).parents[2]
NAMES = ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME")
ENVIRON = {name: value for name, value in os.environ.items() if name not in NAMES}
WAITS = """
import os, sys, time
print("rank", os.environ["RANK"], "waits; threads:", os.environ["OMP_NUM_THREADS"],
      "extra:", os.environ.get("EXTRA"), "other:", os.environ.get("OTHER"), flush=True)
open(f"{sys.argv[1]}/{os.environ['RANK']}", "w").write(str(os.getpid()))
time.sleep(600)
"""


class Servers:
    """Hosts with sshd, and commands that are typed on the first."""

    def __init__(self, hosts: NamedHosts, ssh: str, small_disk: Path) -> None:
        self.hosts, self.ssh, self.small_disk = hosts, ssh, small_disk

    def line(self, *arguments: object, hosts: str = "alpha:2,beta:1") -> list[str]:
        command, *rest = arguments
        options = ("--hosts", hosts, "--ssh", self.ssh)
        return self.hosts.line(0, [sys.executable, "-m", "allstep", command, *options, *rest])

    def run(self, *arguments: object, hosts: str = "alpha:2,beta:1") -> tuple[int, str]:
        done = subprocess.run(
            self.line(*arguments, hosts=hosts),
            cwd=ROOT,
            env=ENVIRON | {"OTHER": "x"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=400,
        )
        return done.returncode, done.stdout


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("ssh")
    fake = folder / "fake" / "torch-9.9.9.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9\n")
    small_disk = folder / "disk"
    small_disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=192k", "tmpfs", small_disk]
    subprocess.run(mount, stderr=subprocess.DEVNULL)  # before the hosts, which see it then
    try:
        with (
            named_hosts(3) as hosts,
            ssh_servers(hosts, folder, {2: {"PYTHONPATH": str(fake.parent)}}) as ssh,
        ):
            yield Servers(hosts, ssh, small_disk)
    finally:
        subprocess.run(["umount", "--lazy", small_disk], stderr=subprocess.DEVNULL)


@pytest.mark.net
@pytest.mark.process
@pytest.mark.timeout(900)
class TestServers:
    @pytest.mark.slow
    def test_digits_on_two_hosts_are_trained_to_the_same_bits_as_on_one_worker(
        self, servers: Servers, tmp_path: Path
    ) -> None:
        flags = ("--epochs", 1, "--width", 4)
        more = ("--run-dir", tmp_path / "two", "--doctor", "quick")
        code, text = servers.run("train", "digits", *flags, *more)
        assert code == 0, text
        assert re.search(r"alpha, beta: Python [\d.]+, torch .* rank 0 at 10\.78\.0\.1:\d+;", text)
        assert re.search(r"carried: OMP_NUM_THREADS=\d+\n", text)
        assert re.search(r"^\[alpha rank 0\] .*", text, re.MULTILINE)
        threads = re.search(r"OMP_NUM_THREADS=(\d+)", text)[1]  # type: ignore[index]
        line = [sys.executable, "-m", "allstep", "train", "digits", *map(str, flags)]
        one = subprocess.run(
            [*line, "--run-dir", str(tmp_path / "one")],
            cwd=ROOT,
            env=ENVIRON | {"OMP_NUM_THREADS": threads},
            capture_output=True,
            text=True,
        )
        assert one.returncode == 0, one.stderr
        trained = [newest_tensors(tmp_path / name) for name in ("one", "two")]
        assert trained[0].keys() == trained[1].keys() and trained[0]
        for name, value in trained[0].items():
            assert value.equal(trained[1][name]), name

    def test_a_wrong_host_name(self, servers: Servers) -> None:
        code, text = servers.run("train", "digits", hosts="alpha:1,nowhere.invalid:1")
        assert code == 2
        assert "`hosts`: nowhere.invalid can't be used" in text and "ssh: " in text
        assert "`ssh nowhere.invalid true`" in text

    def test_another_version_of_torch(self, servers: Servers) -> None:
        code, text = servers.run("train", "digits", hosts="alpha:1,gamma:1")
        assert code == 2
        assert re.search(r"gamma has torch 9\.9\.9, alpha has 2\.[\d.+a-z]+: gradients", text)

    @pytest.mark.slow
    def test_data_that_a_host_lacks(self, servers: Servers) -> None:
        code, text = servers.run("train", "images", "--folder", "/no/such/photos")
        assert code == 2
        assert "alpha has no /no/such/photos, which the training reads" in text

    @pytest.mark.slow
    def test_a_folder_that_a_host_lacks(self, servers: Servers) -> None:
        code, text = servers.run("train", "digits", "--remote-dir", "/no/such/folder")
        assert code == 2
        assert "alpha can't be used" in text and "/no/such/folder" in text
        assert "--remote-dir" in text

    @pytest.mark.slow
    def test_a_full_disk_ends_all(self, servers: Servers) -> None:
        """Of the host of rank 0, which writes the run."""
        if not os.path.ismount(servers.small_disk):
            pytest.skip("nothing can be mounted")
        flags = ("--epochs", 4, "--width", 32, "--checkpoint-every-steps", 5)
        run_dir = servers.small_disk / "run"
        code, text = servers.run("train", "digits", *flags, "--run-dir", run_dir)
        assert code != 0
        assert re.search(r"^\[alpha rank 0\] .*No space left on device", text, re.MULTILINE), text
        assert not list(run_dir.rglob("*.draft"))

    @pytest.mark.slow
    def test_a_host_that_dies_ends_all(self, servers: Servers, tmp_path: Path) -> None:
        def kill_beta(process: subprocess.Popen[str]) -> None:
            """All that runs there, sshd's sessions included, but not the server."""
            listed = subprocess.run(
                ["ip", "netns", "pids", servers.hosts.namespaces[1]], capture_output=True, text=True
            )
            for pid in map(int, listed.stdout.split()):
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    if "sshd -D" not in " ".join(psutil.Process(pid).cmdline()):
                        os.kill(pid, signal.SIGKILL)

        code, text = end_by(servers, tmp_path, kill_beta, "--env", "EXTRA=7")
        assert code == 1, text
        assert "[beta] the connection to beta is lost" in text
        mark = r"^\[beta rank 2\] rank 2 waits; threads: \d+ extra: 7 other: None$"
        assert re.search(mark, text, re.MULTILINE), text

    @pytest.mark.slow
    def test_ctrl_c_ends_all(self, servers: Servers, tmp_path: Path) -> None:
        code, _ = end_by(servers, tmp_path, lambda process: process.send_signal(signal.SIGINT))
        assert code == 130

    @pytest.mark.slow
    def test_the_loss_of_the_command_itself_ends_all(
        self, servers: Servers, tmp_path: Path
    ) -> None:
        code, _ = end_by(servers, tmp_path, lambda process: process.kill())
        assert code == -signal.SIGKILL


def end_by(
    servers: Servers, folder: Path, end: Callable[[subprocess.Popen[str]], None], *options: object
) -> tuple[int, str]:
    """Starts three workers that wait, ends them in some way; none may be left."""
    script = folder / "waits.py"
    script.write_text(WAITS)
    line = servers.line("launch", *options, "--", script, folder)
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            line,
            cwd=ROOT,
            env=ENVIRON | {"OTHER": "x"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        files = [folder / str(rank) for rank in range(3)]
        try:
            printed = folder / "output"
            wait_until(lambda: printed.read_text().count(" waits; ") == 3, process)
            pids = [int(file.read_text()) for file in files]
            end(process)
            process.wait(120)
            wait_until(lambda: not any(map(psutil.pid_exists, pids)))
        finally:
            process.kill()
    return process.returncode, (folder / "output").read_text()


def wait_until(happened: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    deadline_s = time.monotonic() + 200
    while not happened():
        assert time.monotonic() < deadline_s, "it never happened"
        assert process is None or process.poll() is None, "the command ended"
        time.sleep(0.05)


def test_hosts_are_parsed() -> None:
    assert parse_hosts("alpha:2, beta") == (Host("alpha", 2), Host("beta", 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alpha:0", r"`hosts` \(=alpha:0\): alpha shall have '0' workers"),
        ("alpha:x", "give a number of at least 1, such as alpha:2"),
        ("alpha:\u00b2", "give a number of at least 1, such as alpha:2"),
        ("alpha,,beta", r"'' names no host"),
        ("me@", "'me@' names no host"),
        ("alpha\tbeta", "names no host"),
        ("-oProxyCommand=x", "names no host"),
        ("alpha,alpha:2", "alpha comes twice"),
    ],
)
def test_bad_hosts_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_hosts(text)


def test_options_of_hosts_are_split_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A", "1")
    line = ["digits", "--hosts", "a:2,b", "--env", "A", "--env", "B=2", "--epochs", "3"]
    options, rest = split_host_options([*line, "--", "--hosts", "kept"])
    assert options is not None
    assert rest == ["digits", "--epochs", "3", "--", "--hosts", "kept"]
    assert {name: options.carried[name] for name in "AB"} == {"A": "1", "B": "2"}
    assert split_host_options(["digits"]) == (None, ["digits"])


@pytest.mark.parametrize("item", ["=5", "A B=5", "", "2=3"])
def test_variables_that_have_no_name_are_refused(item: str) -> None:
    with pytest.raises(UsageError, match=rf"`env` \(={item}\) names no variable; give NAME"):
        split_host_options(["digits", "--hosts", "alpha", "--env", item])


def test_hosts_without_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    """Whose message shows no flags of other commands."""
    with pytest.raises(SystemExit):
        split_host_options(["--hosts"])
    assert capsys.readouterr().err == "allstep: error: argument --hosts: expected one argument\n"


def test_workers_contradict_hosts(refused: Callable[..., str]) -> None:
    assert "HOST:N" in refused("train", "digits", "--hosts", "a:1,b:1", "--workers", "2")


def test_doctor_takes_a_number_of_workers_with_hosts() -> None:
    _, rest = split_host_options(["--hosts", "a,b", "--workers", "64"])
    assert rest == ["--workers", "64"]


def test_an_ssh_that_cannot_be_run_is_told(refused: Callable[..., str]) -> None:
    line = ("train", "digits", "--hosts", "a,b", "--ssh")
    assert "`ssh` (=ssh 'x): No closing quotation" in refused(*line, "ssh 'x")
    assert "can't be run here (No such file or directory)" in refused(*line, "/no/such/ssh")


def test_hosts_need_only_what_a_training_reads() -> None:
    assert read_command_line("cots")[1].data_paths() == []
    given = read_command_line("cots", "--photos", "folder", "--folder", "p")[1].data_paths()
    assert given == [Path("p")]
    assert read_command_line("cots", "--faces", "f.vec")[1].data_paths() == [Path("f.vec")]
    assert read_command_line("images", "--folder", "p")[1].data_paths() == [Path("p")]


def test_a_host_listens_on_both_families() -> None:
    with listening_socket(0) as server:
        port = server.getsockname()[1]
        for address in ["127.0.0.1", *(["::1"] if server.family == socket.AF_INET6 else [])]:
            socket.create_connection((address, port), 20).close()


def test_a_variable_that_is_not_set_is_refused(refused: Callable[..., str]) -> None:
    message = refused("train", "digits", "--hosts", "a,b", "--env", "NO_SUCH_VARIABLE")
    assert "`env` (=NO_SUCH_VARIABLE) is not set here" in message


def test_a_mistake_in_a_flag_is_told_before_ssh(refused: Callable[..., str]) -> None:
    assert "`--epoch`" in refused("train", "digits", "--hosts", "a,b", "--epoch", "3")


def test_launch_needs_hosts_and_a_script(refused: Callable[..., str]) -> None:
    message = refused("launch", "--", "script.py")
    assert "`hosts` and `elastic` are missing" in message and "--elastic --workers N" in message
    assert "behind `--`" in refused("launch", "--hosts", "a,b", "script.py")


def test_dry_run_prints_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["train", "digits", "--hosts", "me@alpha:2,beta:1", "--env", "X=a b", "--epochs", "3"]
    assert (
        main([*line, "--warmup-epochs", "0", "--dry-run", "--remote-dir", "/shared/my code"]) == 0
    )
    printed = capsys.readouterr().out.splitlines()
    assert [text for text in printed if text.startswith("# on")] == ["# on me@alpha", "# on beta"]
    first, second = (text for text in printed if text.startswith("cd "))
    assert first.startswith("cd '/shared/my code' && ") and " X='a b' " in first
    assert "--node-rank 0 --nproc-per-node 2 --master-addr alpha --master-port 29500" in first
    assert "--node-rank 1 --nproc-per-node 1 --master-addr alpha" in second
    assert second.endswith("-m allstep train digits --epochs 3 --warmup-epochs 0")
    shown = subprocess.run(
        ["sh", "-c", first.partition(" && ")[2].partition(sys.executable)[0] + "printenv X"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == "a b\n"  # a shell takes the line as it is
