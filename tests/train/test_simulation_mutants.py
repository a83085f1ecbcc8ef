"""A simulation that finds nothing is worth nothing: each of these mistakes must fail some seed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_NUM_SEEDS = 600  # until a mistake must have been found
_FIRST_SEEDS = {  # shortly before the one that finds it, where that is not among the first
    "a meeting of another generation": 1450,
    "checksums not checked": 44,
    "no space for a name passed over": 98,
    "what living writers write swept away": 15,
    "what was moved aside swept away": 760,
}

# name -> file, lines of it, and what is there instead
TRAINING_MUTANTS = {
    "a list written twice": (
        "comm/generations.py",
        'store.compare_set(f"{number}/members", "", json.dumps(plain))',
        'store.set(f"{number}/members", json.dumps(plain))',
    ),
    "a list without those who come later": (
        "comm/membership.py",
        "if is_late or all(has_ended(m.place) for m in missing):",
        "if True:",
    ),
    "joiners let in twice": (
        "comm/membership.py",
        "self._num_seen + len(waiting)",
        "self._num_seen",
    ),
    "joiners let in anywhere": (
        "comm/membership.py",
        "lets_in, is_whole = self._lets_in(came[0].progress),",
        "lets_in, is_whole = True,",
    ),
    "joiners kept without a state": (
        "comm/membership.py",
        "came = begun",
        "pass",
    ),
    "a meeting of another generation": (
        "comm/membership.py",
        "PrefixStore(str(self.generation), self._store)",
        'PrefixStore("0", self._store)',
    ),
    "heartbeats not read": (
        "comm/generations.py",
        "self._has_ended(m.place) or self._is_silent(m)",
        "self._has_ended(m.place)",
    ),
    "what was committed not published": (
        "train/worker_changes.py",
        "self._membership.publish(*self._last)",
        "pass",
    ),
    "what was committed not taken": (
        "train/worker_changes.py",
        "return self._membership.read(name)",
        "return None",
    ),
    "the position left where it was": (
        "train/worker_changes.py",
        'self._state.loader.begin_again(self._position["loader"])',
        "pass",
    ),
    "exchanges of the workers before": (
        "train/worker_changes.py",
        "exchange.begin_again(stored)",
        "pass",
    ),
    "gradients of the first attempt kept": (
        "train/elastic_loop.py",
        "before.put_back()",
        "pass",
    ),
    "the last message taken for any other": (
        "train/elastic_loop.py",
        "changes.enter(changes.step, changes.place + 1, is_committing=True)",
        "changes.enter(changes.step, changes.place + 1)",
    ),
    "an update without the others": (
        "train/elastic_loop.py",
        "told = changes.messages.commit(told).wait()",
        "changes.messages.commit(told).wait()",
    ),
}

CHECKPOINT_MUTANTS = {
    "files not synced": (
        "train/storage.py",
        "        disk.sync(path)\n\n",
        "        pass\n\n",
    ),
    "the folder's names not synced": (
        "train/storage.py",
        "    disk.sync(path.parent)\n    if os.path",
        "    if os.path",
    ),
    "the run's names not synced": (
        "train/storage.py",
        "disk.sync(path.parent)  # always",
        "pass  # always",
    ),
    "in place before it is written": (
        "train/storage.py",
        """        _write_manifest_of(temporary, step, files, disk)
        _put_in_place(temporary, path, disk)
""",
        """        _put_in_place(temporary, path, disk)
        _write_manifest_of(path, step, files, disk)
""",
    ),
    "checksums not checked": (
        "train/storage.py",
        "if digest_of(path) != expected:",
        "if False:",
    ),
    "no space for a name passed over": (
        "train/storage.py",
        "                raise\n    _settle(",
        "                return\n    _settle(",
    ),
    "what living writers write swept away": (
        "train/storage.py",
        "return pid == disk.pid or not disk.is_alive(pid)",
        "return True",
    ),
    "what was moved aside swept away": (
        "train/storage.py",
        "                disk.rename(aside, path)\n\n",
        "                disk.remove(aside)\n\n",
    ),
}
MUTANTS = {"training": TRAINING_MUTANTS, "checkpoints": CHECKPOINT_MUTANTS}
ALL = {**TRAINING_MUTANTS, **CHECKPOINT_MUTANTS}


@pytest.mark.parametrize(("file", "line"), [mutant[:2] for mutant in ALL.values()], ids=ALL)
def test_line_of_mutant(file: str, line: str) -> None:
    """The others, which take long, are seldom run."""
    assert (_ROOT / "allstep" / file).read_text().count(line) == 1


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize(
    ("check", "name"), [(check, name) for check, mutants in MUTANTS.items() for name in mutants]
)
def test_mutant(check: str, name: str, tmp_path: Path) -> None:
    file, line, instead = MUTANTS[check][name]
    for folder in ("allstep", "tests"):
        shutil.copytree(_ROOT / folder, tmp_path / folder)  # with what is compiled, as of its time
    path = tmp_path / "allstep" / file
    text = path.read_text()
    assert text.count(line) == 1
    path.write_text(text.replace(line, instead))
    first = _FIRST_SEEDS.get(name, 0)
    seeds = [str(first), str(_NUM_SEEDS)]
    command = [sys.executable, "-m", "tests.helpers.simulation", check, *seeds]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert found.returncode == 1, found.stdout + found.stderr
    assert "seed " in found.stderr, found.stderr
