"""The package as a whole: its version, its door, its layers, its documents."""

import ast
import importlib
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from importlib.metadata import metadata, version
from pathlib import Path

import grimp
import pytest
from packaging.requirements import Requirement

import allstep
from tests import public_names

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_version_is_written_once() -> None:
    assert PYPROJECT["project"]["dynamic"] == ["version"]
    assert "version" not in PYPROJECT["project"]
    written = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "allstep").rglob("*.py")
        if re.search(r"^__version__\s*=", path.read_text(), re.MULTILINE)
    ]
    assert written == ["allstep/__init__.py"]


def test_installed_version_is_this_one() -> None:
    assert version("allstep") == allstep.__version__
    assert metadata("allstep")["License-Expression"] == "Apache-2.0"


def test_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == allstep.__version__


def test_door_imports_nothing_by_itself() -> None:
    loaded = run_python("import allstep, json, sys; print(json.dumps(sorted(sys.modules)))")
    names = json.loads(loaded)
    heavy = {"torch", "numpy", "rich", "tyro", "tensorboard"}
    assert heavy.isdisjoint(names)
    assert [name for name in names if name.startswith("allstep")] == ["allstep"]


def test_only_a_tokenizer_takes_tokenizers() -> None:
    code = """
import sys
sys.modules["tokenizers"] = None
import allstep
print(allstep.data.text_folder.split_text("one two", 0.5))
try:
    allstep.data.text_folder.train_tokenizer(["one"], 300)
except ModuleNotFoundError as error:
    print(error.name)
"""
    assert run_python(code).splitlines() == ["('one', ' two')", "tokenizers"]


def test_only_env_touches_the_environment() -> None:
    modules = (ROOT / "allstep").rglob("*.py")
    others = [path for path in modules if path.parent.name != "env"]
    assert [path.name for path in others if "os.environ" in path.read_text()] == []


def test_import_has_no_side_effects() -> None:
    """Neither the door nor the rooms touch torch's state, logging, signals or threads."""
    code = """
import logging, os, signal, threading
import torch
def state():
    return (
        dict(os.environ), torch.get_default_dtype(), torch.get_num_threads(),
        torch.random.get_rng_state().tolist(), torch.distributed.is_initialized(),
        logging.getLogger().handlers[:], logging.getLogger("allstep").handlers[:],
        signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM),
        threading.active_count(), os.listdir(),
    )
before = state()
import allstep, allstep.cli.main
for name in dir(allstep):
    getattr(allstep, name)
for name in allstep.recipes.REGISTRY:
    allstep.recipes.REGISTRY[name]
assert state() == before
"""
    run_python(code)


@pytest.mark.parametrize("name", allstep.__all__)
def test_door_leads_to_each_name(name: str) -> None:
    assert getattr(allstep, name) is getattr(allstep, name)
    assert name in dir(allstep)


def test_door_refuses_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'atach'"):
        allstep.atach  # noqa: B018


def test_type_checkers_see_the_same_door() -> None:
    """What the stub imports is what `__getattr__` finds."""
    tree = ast.parse((ROOT / "allstep" / "__init__.pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    found = {alias.asname: (node.module, alias.name) for node in imports for alias in node.names}
    rooms = {name for name, (module, _) in found.items() if module == "allstep"}
    assert set(found) - rooms == set(allstep.__all__) - {"__version__"}
    for name, (module, original) in found.items():
        assert module is not None and name == original
        if name in rooms:
            assert getattr(allstep, name) is importlib.import_module(f"allstep.{original}")
        else:
            assert getattr(allstep, name) is getattr(importlib.import_module(module), original)


def modules_in_circles(graph: grimp.ImportGraph) -> set[str]:
    """What is left when modules whose imports are all gone are taken away, again and again."""
    left = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    while done := [module for module, imported in left.items() if not imported & left.keys()]:
        for module in done:
            del left[module]
    return set(left)


def test_no_modules_import_each_other() -> None:
    """Not even for type checkers."""
    graph = grimp.build_graph("allstep", exclude_type_checking_imports=False, cache_dir=None)
    assert modules_in_circles(graph) == set()
    graph.add_import(importer="allstep.errors", imported="allstep.comm.communicator")
    assert {"allstep.errors", "allstep.comm.communicator"} <= modules_in_circles(graph)


def test_public_names_are_those_that_were_reviewed() -> None:
    """A new, renamed or removed name is a line in the diff of `public_names.txt`."""
    reviewed = public_names.FILE.read_text().splitlines()
    found = public_names.public_names()
    assert found == reviewed, "write them anew (python -m tests.public_names) and read the diff"


NAMES_A_DEVICE = re.compile(r"\btorch\.cuda\b|\bis_cuda\b|\.type [!=]= [\"']cuda|[\"']cuda[\"':]")


def names_taken(path: Path) -> list[str]:
    """What a file imports from allstep: its modules and their names."""
    imports = [
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)
    ]
    return [
        f"{node.module}.{alias.name}"
        for node in imports
        if node.module and node.module.split(".")[0] == "allstep"
        for alias in node.names
    ]


@pytest.mark.parametrize("folder", ["benchmarks", "scripts"])
def test_scripts_that_no_test_runs_take_names_that_are_there(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        for name in names_taken(path):
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), f"{path.name}: {name}"


def test_only_the_device_module_names_a_kind_of_accelerator() -> None:
    """One path for CUDA, ROCm, XPU and what comes later; see `allstep.device`."""
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / "allstep").rglob("*.py"))
        if path.name != "device.py"
        for number, line in enumerate(_without_docstrings(path), 1)
        if NAMES_A_DEVICE.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    "line", ["torch.cuda.synchronize()", "if x.is_cuda:", 'device.type == "cuda"', 'device("cuda")']
)
def test_a_kind_of_accelerator_is_seen(line: str) -> None:
    assert NAMES_A_DEVICE.search(line)


# How many lines of a file read the date, which may be set at any moment. It decides no wait, no
# order of events of one host, and nothing that is deleted; a new line says what else it is for.
READS_THE_DATE = {
    "cli/doctor.py": 2,  # compares it with another host's
    "cli/doctor_together.py": 1,
    "cli/host.py": 1,
    "cli/probe_machine.py": 1,
    "cli/run_folder.py": 1,  # a name
    "cli/why.py": 1,  # shown
    "comm/last_state.py": 2,  # when a worker began, and was last seen
    "comm/worker_state.py": 1,  # how long ago that is; of other hosts only
    "train/metrics.py": 1,  # in each line of the log
    "train/storage.py": 2,  # in a manifest; and whether a file has changed
}
_DATES = re.compile(
    r"\btime\.(time|time_ns|localtime|gmtime|ctime|strftime)\b|\bfrom time import .*\btime\b"
    r"|\b(datetime|date)\.(now|utcnow|today)\b|\bst_[acm]time|\bget[acm]time\b|\bCLOCK_REALTIME\b"
)


def test_the_date_decides_nothing() -> None:
    found = Counter(
        str(path.relative_to(ROOT / "allstep"))
        for path in (ROOT / "allstep").rglob("*.py")
        for line in _without_docstrings(path)
        if _DATES.search(line)
    )
    assert found == READS_THE_DATE


@pytest.mark.parametrize(
    "line",
    [
        "while time.time() < deadline_s:",
        "from time import sleep, time",
        "age_s = now_s - path.stat().st_mtime",
        "datetime.datetime.now(datetime.UTC)",
    ],
)
def test_a_date_is_seen(line: str) -> None:
    assert _DATES.search(line)
    assert not _DATES.search("deadline_s = time.monotonic() + timeout_s; from time import sleep")


def _without_docstrings(path: Path) -> list[str]:
    """The lines of a file; those of docstrings, which may name one as an example, are empty."""
    lines = path.read_text().splitlines()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[number] = ""
    return lines


def test_layers_hold() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout


def test_constraints_fit_the_requirements() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    pinned = {_canonical(name): number for name, number in pinned.items()}
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(line for extra in extras for line in extra)]
    for requirement in map(Requirement, wanted):
        if requirement.name != "allstep":
            number = pinned[_canonical(requirement.name)]
            assert requirement.specifier.contains(number), requirement


def test_constraints_name_versions_that_a_registry_has() -> None:
    """A local version such as 2.13.0+cpu is on one machine alone."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    for line in lines:
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", line)


def test_make_train_installs_what_the_readme_installs() -> None:
    by_hand = re.search(r"pip install .* -e '\.\[(\S+)\]'", (ROOT / "README.md").read_text())
    by_make = re.search(r"/recipes\.stamp: EXTRAS := (\S+)", (ROOT / "Makefile").read_text())
    assert by_hand is not None and by_make is not None
    assert by_hand[1] == by_make[1]


def test_package_is_typed() -> None:
    assert (ROOT / "allstep" / "py.typed").exists()


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
