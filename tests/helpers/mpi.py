"""The mpirun and mpiexec that are installed here."""

import os
import shutil

_ROOT = ["--allow-run-as-root"] if os.getuid() == 0 else []
_OPEN_MPI = shutil.which("mpirun.openmpi") or (shutil.which("ompi_info") and "mpirun")
_HYDRA = shutil.which("mpiexec.hydra")

# By the name of their Debian package: a command that starts as many workers as the next argument
# says; None where it is not installed.
LAUNCHERS: dict[str, list[str] | None] = {
    "openmpi-bin": [_OPEN_MPI, *_ROOT, "--oversubscribe", "-n"] if _OPEN_MPI else None,
    "mpich": [_HYDRA, "-n"] if _HYDRA else None,
}
