"""A CloudFormation template of nodes that train together, as plain data."""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from allstep import __version__
from allstep.errors import UsageError, check_integer, check_positive

_FOLDER = files("allstep.cli") / "aws"
_DISK_WITH_DRIVERS_GIB = 150  # the image alone takes tens of them
_MAX_NODES = 100  # larger templates must go through a bucket
_UBUNTU = "/aws/service/canonical/ubuntu/server/24.04/stable/current/{}/hvm/ebs-gp3/ami-id"
_WITH_DRIVERS = (
    "/aws/service/deeplearning/ami/{}/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
)


@dataclass(frozen=True)
class CloudNodes:
    """The nodes of a template.

    Attributes:
        count: of nodes.
        instance: their type, such as "c7i.8xlarge".
        has_efa: whether they get an Elastic Fabric Adapter in the place of a plain interface.
        workers_per_node: None for one, or one for each GPU.
        price_per_hour: of one node; None if no one said.
    """

    count: int
    instance: str
    has_efa: bool = False
    workers_per_node: int | None = None
    price_per_hour: float | None = None

    def check(self) -> None:
        """Raises UsageError if there can't be such nodes."""
        check_integer("nodes", self.count)
        if self.count > _MAX_NODES:
            raise UsageError(f"`nodes` (={self.count}) must be at most {_MAX_NODES}.")
        if not re.fullmatch(r"[a-z]\w*(-\w+)*\.\w+(-\w+)*", self.instance):
            raise UsageError(
                f"`instance` (={self.instance}) is no type of EC2; such as c7i.8xlarge."
            )
        if re.match(r"t\d|\w+-flex\.|mac", self.instance):
            raise UsageError(
                f"`instance` (={self.instance}) can't be in a cluster placement group; take one"
                " without -flex, and none of the t and mac families."
            )
        if re.match(r"g\d\w*ad", self.instance):
            raise UsageError(
                f"`instance` (={self.instance}) has GPUs of AMD, for which the image has no driver;"
                " take a type with NVIDIA's."
            )
        if self.has_efa and self.instance not in efa_instances():
            raise UsageError(
                f"`efa`: {self.instance} has no Elastic Fabric Adapter; {self._advice()}"
                " or leave it out for plain Ethernet."
            )
        if self.workers_per_node is not None:
            check_integer("workers_per_node", self.workers_per_node)
        if self.price_per_hour is not None:
            check_positive("price_per_hour", self.price_per_hour, "pass what one node costs")

    def _advice(self) -> str:
        family = self.instance.partition(".")[0]
        others = [name for name in efa_instances() if name.startswith(f"{family}.")]
        return f"{', '.join(others)} have one," if others else "take one that has,"

    @property
    def has_gpu(self) -> bool:
        return re.match(r"(p|g|gr)\d", self.instance) is not None

    @property
    def num_workers(self) -> int | None:
        """The workers of all nodes; None if each node has one for each of its GPUs."""
        if self.has_gpu and self.workers_per_node is None:
            return None
        return self.count * (self.workers_per_node or 1)

    @property
    def image(self) -> str:
        """The AWS parameter with the newest Ubuntu image, with drivers for nodes with GPUs."""
        is_arm = re.match(r"[a-z]+\d+g|a1\.|p\d+\w*-gb", self.instance) is not None
        if self.has_gpu:
            return _WITH_DRIVERS.format("arm64" if is_arm else "x86_64")
        return _UBUNTU.format("arm64" if is_arm else "amd64")


def efa_instances() -> list[str]:
    """The EC2 instance types with an Elastic Fabric Adapter.

    >>> "c7i.48xlarge" in efa_instances(), "c7i.8xlarge" in efa_instances()
    (True, False)
    """
    lines = (_FOLDER / "efa.txt").read_text(encoding="utf-8").splitlines()
    return [name for line in lines if not line.startswith("#") for name in line.split()]


def make_template(nodes: CloudNodes, train: Sequence[str]) -> dict[str, Any]:
    """The template, for `json.dump`.

    Args:
        nodes: that `check` has accepted.
        train: what follows `allstep train`, but for the run's folder.

    >>> template = make_template(CloudNodes(2, "c7i.8xlarge"), ["digits"])
    >>> [name for name in template["Resources"] if name.startswith("Node")]
    ['Node0', 'Node1']
    """
    template: dict[str, Any] = json.loads((_FOLDER / "template.json").read_text(encoding="utf-8"))
    words = " ".join(map(shlex.quote, train))
    network = "EFA" if nodes.has_efa else "Ethernet"
    template["Description"] = f"allstep train {words}: {nodes.count} x {nodes.instance}, {network}"[
        :1024
    ]
    template["Parameters"]["Image"]["Default"] = nodes.image
    if nodes.has_gpu:
        template["Parameters"]["DiskGiB"]["Default"] = _DISK_WITH_DRIVERS_GIB
    template["Parameters"]["Package"]["Default"] = f"allstep[recipes]=={__version__}"
    resources = template["Resources"]
    launch = resources["Launch"]["Properties"]["LaunchTemplateData"]
    launch["UserData"] = {"Fn::Base64": {"Fn::Join": ["", _boot(nodes, words, template)]}}
    if nodes.has_efa:
        launch["NetworkInterfaces"][0]["InterfaceType"] = "efa"
    for rank in range(nodes.count):
        resources[f"Node{rank}"] = _node(rank, nodes.instance)
    if nodes.price_per_hour is not None:
        price = f"{nodes.count * nodes.price_per_hour:.2f}"
        template["Outputs"]["PricePerHour"] = {"Value": price}
    return template


def _boot(nodes: CloudNodes, words: str, template: dict[str, Any]) -> list[Any]:
    """The parts of a node's boot script, between which CloudFormation inserts its values."""
    workers = nodes.workers_per_node or ("gpu" if nodes.has_gpu else 1)
    return [
        "#!/bin/bash\nFILE_SYSTEM=",
        template["Outputs"]["FileSystem"]["Value"],
        {"Fn::Sub": ".efs.${AWS::Region}.${AWS::URLSuffix}"},
        "\nRUN=",
        {"Ref": "AWS::StackName"},
        "\nPACKAGE='",
        {"Ref": "Package"},
        f"'\nNODES={nodes.count}\nWORKERS_PER_NODE={workers}\nTRAIN={shlex.quote(words)}\n",
        (_FOLDER / "boot.sh").read_text(encoding="utf-8"),
    ]


def _node(rank: int, instance: str) -> dict[str, Any]:
    tags: list[dict[str, Any]] = [
        {"Key": "Name", "Value": {"Fn::Sub": f"${{AWS::StackName}} {rank}"}},
        {"Key": "allstep-rank", "Value": str(rank)},
    ]
    if rank:
        master = {"Fn::GetAtt": ["Node0", "PrivateIp"]}
        tags.append({"Key": "allstep-master", "Value": master})
    version = {"Fn::GetAtt": ["Launch", "LatestVersionNumber"]}
    return {
        "Type": "AWS::EC2::Instance",
        "DependsOn": "SharedMount",
        "Properties": {
            "ImageId": {"Ref": "Image"},
            "InstanceType": instance,
            "LaunchTemplate": {"LaunchTemplateId": {"Ref": "Launch"}, "Version": version},
            "Tags": tags,
        },
    }
