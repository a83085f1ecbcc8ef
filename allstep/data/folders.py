"""Lists the files in a folder and its sub-folders; links to folders are followed."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from allstep.errors import UsageError


def file_names(folder: Path, start: str = "") -> Iterator[str]:
    """The names of the files below `folder/start`, with `/` between folders, in any order.

    Args:
        folder: the folder to which the names are relative.
        start: the sub-folder whose files are listed; "" for the whole folder.

    Raises:
        UsageError: if a folder can't be read, or a link leads to a folder that contains it.
    """

    def refuse(error: OSError) -> NoReturn:
        raise UsageError(
            f"`folder` (={folder}): {error.filename} can't be read ({error.strerror}); make it"
            " readable or remove it."
        ) from None

    root = os.path.join(folder, "")
    for path, folders, files in os.walk(root + start, onerror=refuse, followlinks=True):
        below = path.removeprefix(root)
        for name in folders:
            link = os.path.join(path, name)
            if os.path.islink(link) and os.path.realpath(link) in _folders_of(path, root):
                raise UsageError(
                    f"`folder` (={folder}): the link {link} leads to a folder that it is in, whose"
                    " files would come again and again; remove it."
                )
        yield from (os.path.join(below, name) for name in files)


def _folders_of(path: str, root: str) -> set[str]:
    """The root and the path's folders below it, with links resolved."""
    parts = path.removeprefix(root).split("/")
    return {os.path.realpath(root + "/".join(parts[:n])) for n in range(len(parts) + 1)}
