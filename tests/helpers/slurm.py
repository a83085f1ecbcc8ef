"""A real Slurm cluster on hosts in namespaces: one controller, and a node of two cores on each."""

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.named_hosts import NamedHosts

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", "sinfo")
_START_S = 60.0


class Slurm:
    """Commands of a running cluster; the first host has the controller."""

    def __init__(self, hosts: NamedHosts, folder: Path) -> None:
        self.hosts, self._folder, self._conf = hosts, folder, folder / "slurm.conf"

    def line(self, *command: object, host: int = 0) -> list[str]:
        """A command line that runs one of Slurm's commands on a host."""
        return self.hosts.line(host, ["env", f"SLURM_CONF={self._conf}", *command])

    def run(self, *command: object, cwd: Path | None = None, timeout_s: float = 60.0) -> str:
        """What a command prints; it must succeed."""
        done = subprocess.run(
            self.line(*command),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def state(self, job: str) -> str:
        """Of a job, in Slurm's words, such as PENDING, RUNNING and COMPLETED."""
        words = self.run("scontrol", "show", "job", job).split()
        return next(word for word in words if word.startswith("JobState="))[len("JobState=") :]

    def has_files(self, job: str) -> bool:
        """Whether a node still has a job's; it could not start again there, and would be held."""
        folders = [self._folder / name / f"job{int(job):05}" for name in self.hosts.names]
        return any(folder.exists() for folder in folders)


@contextmanager
def slurm_cluster(hosts: NamedHosts, folder: Path) -> Iterator[Slurm]:
    """Starts a cluster on all hosts; skips where it can't be."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing or os.getuid():
        pytest.skip(f"needs root, munge and slurm-wlm: no {', '.join(missing)}")
    _write_settings(hosts, folder)
    slurm = Slurm(hosts, folder)
    munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket"]
    munged += [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
    lines: list[Sequence[str]] = [munged, slurm.line("slurmctld", "-D", "-c")]
    lines += [
        slurm.line("slurmd", "-D", "-N", name, host=number)
        for number, name in enumerate(hosts.names)
    ]
    with (folder / "log").open("w") as log:
        daemons = [
            subprocess.Popen(x, stdin=subprocess.DEVNULL, stdout=log, stderr=log) for x in lines
        ]
        try:
            _wait_for_nodes(slurm, folder)
            yield slurm
        finally:
            for daemon in reversed(daemons):  # all the others ask munged
                daemon.terminate()
                try:
                    daemon.wait(10)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()


def _write_settings(hosts: NamedHosts, folder: Path) -> None:
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    for name in ("controller", *hosts.names):
        (folder / name).mkdir()
    nodes = [
        f"NodeName={name} NodeAddr={address} Port=6818 CPUs=2 RealMemory=1000 State=UNKNOWN"
        for name, address in zip(hosts.names, hosts.addresses, strict=True)
    ]
    settings = f"""
ClusterName=test
SlurmctldHost={hosts.names[0]}({hosts.addresses[0]})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1
ReturnToService=0
MpiDefault=none
KillWait=10
{chr(10).join(nodes)}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
    (folder / "slurm.conf").write_text(settings)
    # Nothing uses it, but slurmd would look for the kind that is mounted, and none is here.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")


def _wait_for_nodes(slurm: Slurm, folder: Path) -> None:
    deadline_s = time.monotonic() + _START_S
    while True:
        done = subprocess.run(
            slurm.line("sinfo", "--noheader", "--Node", "--format=%T"),
            capture_output=True,
            text=True,
        )
        if done.stdout.split() == ["idle"] * len(slurm.hosts.names):
            return
        if time.monotonic() > deadline_s:
            log = (folder / "log").read_text()[-2000:]
            pytest.skip(f"Slurm does not start here: {done.stdout}{done.stderr}{log}")
        time.sleep(0.2)
