"""Reads clusters from small TOML files, some of which come with the package."""

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args, get_type_hints

from allstep.errors import UsageError, nearest_names
from allstep.plan.cluster import Cluster
from allstep.plan.nodes import Link

_KINDS: Mapping[Any, tuple[type | tuple[type, ...], str]] = {
    bool: (bool, "true or false"),
    str: (str, "a text in quotes"),
    int: (int, "a whole number"),
    float: ((int, float), "a number"),
    Link: (dict, "a table, such as [intra]"),
}


def preset_names() -> list[str]:
    """Names of the clusters that come with the package.

    Returns:
        The names, sorted; `read_cluster` accepts them.
    """
    folder = files("allstep.plan") / "presets"
    return sorted(
        entry.name.removesuffix(".toml")
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    )


def read_cluster(name: str) -> Cluster:
    """A cluster from a preset's name or from a TOML file.

    Args:
        name: one of `preset_names()`, or the path of a file.

    Returns:
        The cluster.

    Raises:
        UsageError: if there is no such preset or file, or the file describes no valid cluster; the
            message says which key is wrong, and why.

    >>> read_cluster("mn-1").num_workers
    1024
    """
    if name in preset_names():
        text = (files("allstep.plan") / "presets" / f"{name}.toml").read_text(encoding="utf-8")
        return parse_cluster(text, name)
    path = Path(name)
    if not path.is_file():
        raise UsageError(
            f"`cluster` (={name}) is neither a file nor a preset;"
            f" {nearest_names(name, preset_names())}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"`cluster` (={name}) can't be read: {error}.") from None
    return parse_cluster(text, name)


def parse_cluster(text: str, where: str) -> Cluster:
    """The cluster that the text of a TOML file describes.

    Args:
        text: the text.
        where: name of the file, for error messages; its stem is the cluster's default name.
    """
    try:
        table = tomllib.loads(text)
        return _cluster(table, Path(where).stem)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{where} is no TOML file: {error}.") from None
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _cluster(table: dict[str, Any], stem: str) -> Cluster:
    values: dict[str, Any] = {"name": stem, **table}
    _check_keys(values, Cluster, _hints(Cluster) | {"num_workers": int})
    num_workers = values.pop("num_workers", None)
    for name in ("intra", "inter"):
        if name in values:
            values[name] = _link(values[name], name)
    cluster = Cluster(**values)
    if num_workers not in (None, cluster.num_workers):
        raise UsageError(
            f"`num_workers` (={num_workers}) contradicts {cluster.num_nodes} nodes x"
            f" {cluster.workers_per_node} workers = {cluster.num_workers}; leave it out."
        )
    return cluster


def _link(table: dict[str, Any], name: str) -> Link:
    _check_keys(table, Link, _hints(Link), f"{name}.")
    try:
        return Link(**table)
    except UsageError as error:
        raise UsageError(str(error).replace("`", f"`{name}.", 1)) from None


def _hints(kind: type[Cluster | Link]) -> dict[str, Any]:
    """The fields of `kind` whose values a file can hold, with their types."""
    hints = {name: (get_args(hint) or (hint,))[0] for name, hint in get_type_hints(kind).items()}
    return {name: hint for name, hint in hints.items() if hint in _KINDS}


def _check_keys(
    table: dict[str, Any], kind: type[Cluster | Link], known: Mapping[str, Any], prefix: str = ""
) -> None:
    for key, value in table.items():
        if key not in known:
            raise UsageError(f"`{prefix}{key}` is no key of a cluster; {nearest_names(key, known)}")
        allowed, words = _KINDS[known[key]]
        if not isinstance(value, allowed) or (isinstance(value, bool) and allowed is not bool):
            raise UsageError(f"`{prefix}{key}` (={value!r}) must be {words}.")
    for field in fields(kind):
        if field.default is MISSING and field.name not in table:
            raise UsageError(f"`{prefix}{field.name}` is missing.")
