"""Runs a script or a module, and ends its process when that is done, without a teardown.

python -m tests.helpers.leave_at_once SCRIPT_OR_MODULE ARGUMENTS ...

Of Accelerate's workers under torchrun about one in thirty aborted after its last line, when the
interpreter took native threads (torch's, Gloo's, pyarrow's) down: "terminate called without an
active exception". What a worker has trained was saved by then. An error before is one here, too.
"""

import os
import runpy
import sys


def main() -> None:
    sys.argv = sys.argv[1:]
    name = sys.argv[0]
    if name.endswith(".py"):
        runpy.run_path(name, run_name="__main__")
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
