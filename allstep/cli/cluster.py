"""`allstep cluster template aws`: nodes in a cloud that train together, as a file for its tools."""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from allstep.cli.aws_template import CloudNodes, make_template
from allstep.cli.output_files import writing_errors
from allstep.cli.run_folder import shares_fit
from allstep.cli.train import LaunchOptions, read_command_line
from allstep.errors import UsageError
from allstep.files import write_whole
from allstep.recipes import Recipe


def run(arguments: list[str]) -> int:
    """Writes a CloudFormation template, after all checks."""
    number = arguments.index("--") if "--" in arguments else len(arguments)
    known = _parser().parse_args(arguments[:number])
    nodes = CloudNodes(
        known.nodes, known.instance, known.efa, known.workers_per_node, known.price_per_hour
    )
    nodes.check()
    train = arguments[number + 1 :] or ["digits"]
    _check_train(train, nodes.num_workers)
    if known.output is not None and known.output.exists():
        raise UsageError(f"`output` (={known.output}) exists; name another, or remove it.")
    text = json.dumps(make_template(nodes, train), indent=1) + "\n"
    if known.output is None:
        print(text, end="")
    else:
        with writing_errors(f"`output` (={known.output})"):
            write_whole(known.output, text)
    _advise(nodes, known.output)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="allstep cluster",
        description="Writes a CloudFormation template of nodes that train together.",
        epilog="After --: what they train, as after `allstep train`; digits if nothing is there.",
        allow_abbrev=False,
    )
    parser.add_argument("what", choices=["template"])
    parser.add_argument("cloud", choices=["aws"])
    parser.add_argument("--nodes", metavar="N", type=int, required=True)
    parser.add_argument("--instance", metavar="TYPE", required=True, help="such as c7i.8xlarge")
    network = parser.add_mutually_exclusive_group()
    network.add_argument("--ethernet", action="store_true", help="a plain interface, the default")
    network.add_argument("--efa", action="store_true", help="an Elastic Fabric Adapter, for NCCL")
    parser.add_argument(
        "--workers-per-node", metavar="N", type=int, help="one, or one for each GPU"
    )
    parser.add_argument("--price-per-hour", metavar="X", type=float, help="of one node")
    parser.add_argument("--output", metavar="FILE", type=Path, help="instead of printing it")
    return parser


def _check_train(train: Sequence[str], num_workers: int | None) -> None:
    """Checks the command that the nodes run, except for its data, which only the nodes have.

    Args:
        train: what follows `--`.
        num_workers: of all nodes; None if that is not known.

    Raises:
        UsageError: unless a recipe and its flags are named, nothing that the nodes decide, and so
            many workers can train it.
    """
    if train[0].startswith("-"):
        raise UsageError(f"Name the recipe after `--`, before `{train[0]}`: -- digits --epochs 3.")
    with contextlib.redirect_stdout(sys.stderr):  # the template may go to stdout
        launch, recipe = read_command_line(*train)
    if replace(launch, large_batch=None, doctor=None) != LaunchOptions():
        raise UsageError(
            "Of the flags of `allstep train`, those of the recipe, `--large-batch` and `--doctor`"
            " can be given: how many workers there are and where the run is, the nodes say."
        )
    if num_workers is None:
        return
    recipe.check_workers(num_workers)
    num_shares = num_workers // recipe.copy_size
    if isinstance(recipe, Recipe) and not shares_fit(recipe, num_shares):
        raise UsageError(
            f"`shares` (={recipe.shares}) must be of the {num_shares} workers that the nodes have,"
            " one number for each."
        )


def _advise(nodes: CloudNodes, output: Path | None) -> None:
    """Prints the cost and the next commands."""
    lines = []
    if nodes.has_efa and not nodes.has_gpu:
        lines.append("note: an EFA speeds up NCCL; Gloo, which CPUs use, sends as by Ethernet.")
    if nodes.price_per_hour is not None:
        price = nodes.count * nodes.price_per_hour
        lines.append(
            f"{nodes.count} x {nodes.price_per_hour:g} = {price:.2f} an hour, {720 * price:,.0f} in"
            " 30 days, until the stack is deleted; and the shared folder's, which stays"
        )
    if output is not None:
        lines.append(
            f"aws cloudformation deploy --template-file {output} --stack-name allstep"
            " --parameter-overrides Vpc=vpc-... Subnet=subnet-..."
        )
    print("\n".join(lines), end="\n" if lines else "", file=sys.stderr)
