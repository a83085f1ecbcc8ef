"""Limits of this process: cores, open files and connections."""

import os
import resource
from pathlib import Path


def num_cores() -> int:
    """Number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def make_room(num_descriptors: int) -> int:
    """Raises the limit of open files, as far as the system allows, to fit `num_descriptors` more.

    Args:
        num_descriptors: files and connections that are about to be opened.

    Returns:
        How many more files and connections can be opened under the limit.

    >>> make_room(1) > 0
    True
    """
    num_open = _num_open()
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit - num_open < num_descriptors:
        wanted = num_open + 2 * num_descriptors  # leaves room for files that the user opens
        limit = wanted if highest == resource.RLIM_INFINITY else min(wanted, highest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, highest))
    return num_descriptors if limit == resource.RLIM_INFINITY else limit - num_open


def _num_open() -> int:
    """Number of this process's open descriptors; a guess where the system does not list them."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        if Path(folder).is_dir():
            return len(os.listdir(folder))
    return 64
