"""`allstep cluster template aws`: what it writes and refuses; test_clusters.py runs its script."""

import json
from pathlib import Path
from typing import Any

import pytest

from allstep.cli.aws_template import CloudNodes, make_template
from allstep.cli.main import main
from tests.helpers.cluster_tools import run_tool

COMMAND = ("cluster", "template", "aws")
PLAIN = (*COMMAND, "--nodes", "3", "--instance", "c7i.8xlarge")
KINDS = {
    "ethernet": CloudNodes(3, "c7i.8xlarge"),
    "efa": CloudNodes(2, "p4d.24xlarge", has_efa=True, price_per_hour=1.5),
    "arm": CloudNodes(1, "c7gn.16xlarge", has_efa=True, workers_per_node=4),
}


def launch_data(template: dict[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = template["Resources"]["Launch"]["Properties"]["LaunchTemplateData"]
    return data


def test_a_template_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAIN, "--price-per-hour", "1.5", "--", "digits", "--epochs", "3"]) == 0
    printed = capsys.readouterr()
    template = json.loads(printed.out)
    nodes = [name for name in template["Resources"] if name.startswith("Node")]
    assert nodes == ["Node0", "Node1", "Node2"]
    assert template["Outputs"]["PricePerHour"] == {"Value": "4.50"}
    assert "3 x 1.5 = 4.50 an hour" in printed.err
    assert "InterfaceType" not in launch_data(template)["NetworkInterfaces"][0]
    boot = "".join(map(str, launch_data(template)["UserData"]["Fn::Base64"]["Fn::Join"][1]))
    assert "TRAIN='digits --epochs 3'" in boot and "NODES=3\nWORKERS_PER_NODE=1\n" in boot


def test_a_template_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.json"
    assert main([*PLAIN, "--output", str(file)]) == 0
    assert json.loads(file.read_text()) == make_template(KINDS["ethernet"], ["digits"])
    assert f"--template-file {file}" in capsys.readouterr().err
    assert main([*PLAIN, "--output", str(file)]) == 2
    assert f"`output` (={file}) exists" in capsys.readouterr().err
    assert main([*PLAIN, "--output", str(tmp_path / "none" / "x.json")]) == 2
    assert "can't be written (No such file or directory)" in capsys.readouterr().err


def test_a_type_with_gpus_has_a_worker_for_each_and_an_image_with_drivers() -> None:
    template = make_template(KINDS["efa"], ["digits"])
    assert launch_data(template)["NetworkInterfaces"][0]["InterfaceType"] == "efa"
    assert "nvidia" in template["Parameters"]["Image"]["Default"]
    plain = make_template(KINDS["ethernet"], ["digits"])["Parameters"]["DiskGiB"]["Default"]
    assert template["Parameters"]["DiskGiB"]["Default"] > plain
    parts = launch_data(template)["UserData"]["Fn::Base64"]["Fn::Join"][1]
    assert any("WORKERS_PER_NODE=gpu\n" in part for part in parts if isinstance(part, str))


def test_the_image_fits_the_processor() -> None:
    assert "/arm64/" in KINDS["arm"].image and "/amd64/" in KINDS["ethernet"].image


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--nodes", "0"], "`nodes` (=0) must be"),
        (["--nodes", "101"], "`nodes` (=101) must be at most 100"),
        (["--instance", "c7i"], "`instance` (=c7i) is no type of EC2"),
        (["--instance", "t3.large"], "(=t3.large) can't be in a cluster placement group"),
        (["--instance", "c7i-flex.large"], "(=c7i-flex.large) can't be in a cluster"),
        (["--efa"], "c7i.8xlarge has no Elastic Fabric Adapter; c7i.48xlarge, c7i.metal-48xl"),
        (["--instance", "g4ad.xlarge"], "(=g4ad.xlarge) has GPUs of AMD"),
        (["--workers-per-node", "0"], "`workers_per_node` (=0) must be"),
        (["--price-per-hour", "-1"], "`price_per_hour` (=-1.0) must be"),
        (["--", "digit"], "digits"),
        (["--", "--epochs", "3"], "Name the recipe"),
        (["--", "digits", "--epoch", "3"], "--epochs"),
        (["--", "digits", "--workers", "2"], "how many workers there are"),
        (["--", "cots", "--data-parallel", "2"], "(=2) must divide the workers (3)"),
        (["--", "digits", "--shares", "3,1"], "(=3,1) must be of the 3 workers that the nodes"),
    ],
)
def test_a_mistake_is_named_before_anything_is_written(
    changed: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.json"
    assert main([*PLAIN, "--output", str(file), *changed]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == ""
    assert not file.exists()


def test_what_needs_a_number_of_workers_is_written_for_so_many(
    capsys: pytest.CaptureFixture[str],
) -> None:
    two_each = (*PLAIN, "--workers-per-node", "2", "--")
    assert main([*two_each, "cots", "--data-parallel", "2"]) == 0
    assert main([*two_each, "digits", "--shares", "3,1,3,1,3,1"]) == 0
    with_gpus = (*COMMAND, "--nodes", "3", "--instance", "g5.12xlarge", "--")  # who knows how many
    assert main([*with_gpus, "digits", "--shares", "3,1"]) == 0
    assert "must" not in capsys.readouterr().err


def written(kind: str, folder: Path) -> Path:
    file = folder / "cluster.json"
    file.write_text(json.dumps(make_template(KINDS[kind], ["digits"])))
    return file


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_cfn_lint_has_no_word_against_a_template(kind: str, tmp_path: Path) -> None:
    file = written(kind, tmp_path)
    assert run_tool("cfnlint", "cfn-lint", file, home=tmp_path) == ""
    file.write_text(file.read_text().replace('"SubnetId"', '"Subnet"'))
    with pytest.raises(AssertionError, match="'Subnet' was unexpected"):
        run_tool("cfnlint", "cfn-lint", file, home=tmp_path)


CREATE = """
import sys
import boto3, moto

with moto.mock_aws():
    where = {"region_name": "us-east-1"}
    ec2, formation = boto3.client("ec2", **where), boto3.client("cloudformation", **where)
    subnet = ec2.describe_subnets()["Subnets"][0]
    image = ec2.describe_images()["Images"][0]["ImageId"]
    boto3.client("ssm", **where).put_parameter(Name="/an/image", Value=image, Type="String")
    given = {"Vpc": subnet["VpcId"], "Subnet": subnet["SubnetId"], "Image": "/an/image"}
    formation.create_stack(
        StackName="first",
        TemplateBody=open(sys.argv[1]).read(),
        Parameters=[{"ParameterKey": k, "ParameterValue": v} for k, v in given.items()],
    )
    stack = formation.describe_stacks(StackName="first")["Stacks"][0]
    print(len(boto3.client("efs", **where).describe_file_systems()["FileSystems"]), "folders")
    print(stack["StackStatus"])
    for reservation in ec2.describe_instances()["Reservations"]:
        for instance in reservation["Instances"]:
            tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
            print(tags["allstep-rank"], tags.get("allstep-master"), instance["PrivateIpAddress"])
"""


@pytest.mark.process
@pytest.mark.slow
def test_a_stack_is_created_whose_nodes_know_rank_and_master(tmp_path: Path) -> None:
    """By moto, which imitates AWS."""
    file = written("ethernet", tmp_path)
    template = json.loads(file.read_text())
    del template["Parameters"]["Image"]["Default"]  # moto has no images of Ubuntu's
    file.write_text(json.dumps(template))
    lines = run_tool("moto", "python", "-c", CREATE, file, home=tmp_path).splitlines()
    assert lines[-5:-3] == ["1 folders", "CREATE_COMPLETE"]
    nodes = sorted(line.split() for line in lines[-3:])
    assert [rank for rank, _, _ in nodes] == ["0", "1", "2"]
    assert [master for _, master, _ in nodes] == ["None", nodes[0][2], nodes[0][2]]
