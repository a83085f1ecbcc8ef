"""Trains a recipe by TorchX, on any of its schedulers.

torchx run --scheduler local_cwd component.py:train digits --run-dir runs/first --resume auto
torchx run --scheduler kubernetes component.py:train --image registry.example.com/allstep:0.1.0 ...
"""

from torchx.components import dist
from torchx.specs import AppDef


def train(
    *arguments: str,
    j: str = "2x1",
    image: str = "",
    cpu: int = 2,
    gpu: int = 0,
    memory_mb: int = 2048,
    port: int = 29500,
    max_retries: int = 20,
) -> AppDef:
    """Workers that train a recipe together.

    Args:
        arguments: what follows `allstep train`
        j: nodes x workers on each
        image: that has allstep[recipes]; for schedulers of containers
        cpu: cores of a node
        gpu: GPUs of a node
        memory_mb: memory of a node
        port: on which the first node listens
        max_retries: how often the scheduler starts the nodes again
    """
    workers_per_node = int(j.split("x")[-1])
    return dist.ddp(
        "train",
        *arguments,
        m="allstep",
        name="allstep",
        j=j,
        image=image,
        cpu=cpu,
        gpu=gpu,
        memMB=memory_mb,
        env={"OMP_NUM_THREADS": str(max(1, cpu // workers_per_node))},
        rdzv_port=port,
        max_retries=max_retries,
    )
