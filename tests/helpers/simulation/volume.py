"""Files that may be lost: what was not synced when a host loses its power."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random


@dataclass
class _File:
    data: bytes = b""
    synced: bytes = b""
    writer: int = 0  # the host that wrote last


@dataclass
class _Folder:
    entries: "_Entries" = field(default_factory=dict)
    synced: "_Entries" = field(default_factory=dict)
    changes: list[tuple[int, "_Change"]] = field(default_factory=list)  # by which host


_Node = _File | _Folder
_Entries = dict[str, _Node]
_Change = dict[str, _Node | None]


class Volume:
    """A folder of this machine, and which of its contents would outlive a loss of power.

    As POSIX has it: a file's bytes are safe once it was synced, its name once its folder was. Since
    then the last changes of a folder's names may be undone; of what was written to a file, a part,
    all, or zeros in its place may be there.

    Args:
        root: the folder, empty.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._top = _Folder()

    def write(self, path: Path, data: bytes, host: int) -> None:
        """A file's contents, from its start.

        Args:
            path: the file; it may be new.
            data: all of it.
            host: who writes.
        """
        path.write_bytes(data)
        folder = self._folder(path.parent)
        file = folder.entries.get(path.name)
        if not isinstance(file, _File):
            file = _File()
            _change(folder, host, {path.name: file})
        file.data, file.writer = data, host

    def make_folder(self, path: Path, host: int) -> None:
        path.mkdir()
        _change(self._folder(path.parent), host, {path.name: _Folder()})

    def rename(self, path: Path, target: Path, host: int) -> None:
        assert path.parent == target.parent
        path.rename(target)
        folder = self._folder(path.parent)
        node = folder.entries[path.name]
        _change(folder, host, {path.name: None, target.name: node})

    def remove(self, path: Path, host: int) -> None:
        """A file, or an empty folder."""
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink()
        _change(self._folder(path.parent), host, {path.name: None})

    def sync(self, path: Path) -> None:
        if path == self.root.parent:
            return  # whose names are safe
        node = self._node(path)
        if isinstance(node, _File):
            node.synced = node.data
        else:
            node.synced, node.changes = dict(node.entries), []

    def lose_power(self, hosts: Callable[[int], bool], random: Random) -> None:
        """What these hosts have not synced may be gone.

        Args:
            hosts: whether one is among them.
            random: decides.
        """
        _tear(self._top, hosts, random)
        for path in self.root.iterdir():
            shutil.rmtree(path)
        _restore(self._top, self.root)

    def _node(self, path: Path) -> _Node:
        node: _Node = self._top
        for name in path.relative_to(self.root).parts:
            assert isinstance(node, _Folder)
            node = node.entries[name]
        return node

    def _folder(self, path: Path) -> _Folder:
        node = self._node(path)
        assert isinstance(node, _Folder)
        return node


def _change(folder: _Folder, host: int, change: _Change) -> None:
    folder.changes.append((host, change))
    _apply(change, folder.entries)


def _apply(change: _Change, entries: _Entries) -> None:
    for name, node in change.items():
        if node is None:
            del entries[name]
        else:
            entries[name] = node


def _tear(folder: _Folder, hosts: Callable[[int], bool], random: Random) -> None:
    undone = random.choice((0.0, 0.5, 1.0))
    while folder.changes and hosts(folder.changes[-1][0]) and random.random() < undone:
        folder.changes.pop()
    folder.entries = dict(folder.synced)
    for _, change in folder.changes:
        _apply(change, folder.entries)
    for node in folder.entries.values():
        if isinstance(node, _Folder):
            _tear(node, hosts, random)
        elif node.data != node.synced and hosts(node.writer):
            size = len(node.data)
            kept = node.data[: random.randrange(size + 1)]
            node.data = random.choice((node.synced, kept, bytes(size), node.data))


def _restore(folder: _Folder, path: Path) -> None:
    for name, node in folder.entries.items():
        if isinstance(node, _Folder):
            (path / name).mkdir()
            _restore(node, path / name)
        else:
            (path / name).write_bytes(node.data)
