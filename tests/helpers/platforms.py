"""What cluster platforms start on a node, and tell it, by the files of `examples/clusters`."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from allstep.cli.aws_template import CloudNodes, make_template

EXAMPLES = Path(__file__).parents[2] / "examples" / "clusters"
_JOB_BACKOFF_S = 10  # after which a Job makes the first pod anew; then twice as long each time


@dataclass(frozen=True)
class Started:
    """What runs on each node.

    Attributes:
        commands: one a node.
        environs: what the platform and the file add to each node's environment.
        names: of each node for the others; empty where they use addresses.
        restarts_all: whether the platform starts all nodes again when one is lost, or that one.
        restart_delay_s: how long a node that is lost stays away at least.
    """

    commands: Sequence[Sequence[str]]
    environs: Sequence[Mapping[str, str]]
    names: Sequence[str] = field(default=())
    restarts_all: bool = False
    restart_delay_s: int = 0


def read(path: str, shared: Path) -> list[Any]:
    """The documents of a file, `/shared` being another folder."""
    text = (EXAMPLES / path).read_text().replace("/shared", str(shared))
    return list(yaml.safe_load_all(text))


def kubernetes(shared: Path, addresses: Sequence[str], flags: Sequence[str]) -> Started:
    """By the documentation of Indexed Jobs: an index, a host name, and names of the service."""
    service, job = read("kubernetes/job.yaml", shared)
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    count = job["spec"]["completions"]
    environs = [
        {x["name"]: x["value"] for x in container["env"]} | {"JOB_COMPLETION_INDEX": str(index)}
        for index in range(count)
    ]
    words = [*container["command"], *container["args"], *flags]
    return Started(
        [[_expand(word, environ) for word in words] for environ in environs],
        environs,
        names=[f"{job['metadata']['name']}-{index}.{pod['subdomain']}" for index in range(count)],
        restart_delay_s=_JOB_BACKOFF_S,
    )


def _expand(word: str, environ: Mapping[str, str]) -> str:
    """As Kubernetes does with a container's command: `$(NAME)`."""
    return re.sub(r"\$\((\w+)\)", lambda match: environ[match[1]], word)


def kubeflow(shared: Path, addresses: Sequence[str], flags: Sequence[str]) -> Started:
    """By Kubeflow Trainer's plugin for torch."""
    (job,) = read("kubernetes/trainjob.yaml", shared)
    trainer, name = job["spec"]["trainer"], job["metadata"]["name"]
    names = [f"{name}-node-0-{index}.{name}" for index in range(trainer["numNodes"])]
    environs = [
        {x["name"]: x["value"] for x in trainer["env"]}
        | {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": names[0],
            "PET_MASTER_PORT": "29500",
        }
        for index in range(trainer["numNodes"])
    ]
    commands = [[*trainer["command"], *trainer["args"], *flags]] * len(names)
    return Started(commands, environs, names, restart_delay_s=_JOB_BACKOFF_S)


def skypilot(shared: Path, addresses: Sequence[str], flags: Sequence[str]) -> Started:
    """By SkyPilot's documentation of distributed jobs."""
    (task,) = read("skypilot/train.sky.yaml", shared)
    environs = [
        {name: str(value) for name, value in task["envs"].items()}
        | {
            "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NODE_IPS": "\n".join(addresses),
        }
        for rank in range(task["num_nodes"])
    ]
    script = f"{task['setup']}\n{task['run'].rstrip()} {' '.join(flags)}"
    return Started([["bash", "-c", script]] * len(environs), environs, restarts_all=True)


def dstack(shared: Path, addresses: Sequence[str], flags: Sequence[str]) -> Started:
    """By dstack's documentation of distributed tasks."""
    (task,) = read("dstack/train.dstack.yml", shared)
    environs = [
        dict(entry.split("=", 1) for entry in task["env"])
        | {
            "DSTACK_NODES_NUM": str(task["nodes"]),
            "DSTACK_NODE_RANK": str(rank),
            "DSTACK_MASTER_NODE_IP": addresses[0],
        }
        for rank in range(task["nodes"])
    ]
    script = f"{' && '.join(task['commands'])} {' '.join(flags)}"
    return Started([["bash", "-c", script]] * len(environs), environs, restarts_all=True)


def aws(shared: Path, addresses: Sequence[str], flags: Sequence[str]) -> Started:
    """By the boot script of a CloudFormation template, with stand-ins for what AWS has."""
    folder = shared.parent
    template = make_template(CloudNodes(2, "c7i.8xlarge"), ["digits", *flags])
    data = template["Resources"]["Launch"]["Properties"]["LaunchTemplateData"]
    known = {
        "AWS::StackName": "first",
        "Package": "allstep[recipes]",
        ".efs.${AWS::Region}.${AWS::URLSuffix}": ".efs.example.com",
        "HasNewFileSystem": "fs-1",
    }
    _, parts = data["UserData"]["Fn::Base64"]["Fn::Join"]
    texts = [part if isinstance(part, str) else known[_first_name(part)] for part in parts]
    (folder / "boot.sh").write_text("".join(texts))
    node = [sys.executable, "-m", "tests.helpers.aws_node", str(folder)]
    commands = [[*node, str(rank), own, addresses[0]] for rank, own in enumerate(addresses)]
    return Started(commands, [{}] * len(commands), restart_delay_s=10)  # as the script's service


def _first_name(function: Mapping[str, Any]) -> str:
    """What a function of CloudFormation is about: `{"Ref": name}`, `{"Fn::If": [name, ...]}`."""
    (argument,) = function.values()
    return argument if isinstance(argument, str) else argument[0]


PLATFORMS = {
    "aws": aws,
    "kubernetes": kubernetes,
    "kubeflow": kubeflow,
    "skypilot": skypilot,
    "dstack": dstack,
}
