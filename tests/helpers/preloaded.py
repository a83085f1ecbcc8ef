"""What the processes of tests would import, each in seconds: theirs once they are forked."""

import gc
from importlib import import_module

# torch's optimizers import `torch._dynamo`. Of allstep by its full name: `import allstep` imports
# nothing.
for _name in (
    "allstep.cli.launch",
    "allstep.cli.script_worker",
    "hypothesis",
    "pytest",
    "sklearn.datasets",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "torch.utils.tensorboard",
):
    import_module(_name)

# Else each process's collector, and who asks it for referrers, looks through all of that.
gc.freeze()
