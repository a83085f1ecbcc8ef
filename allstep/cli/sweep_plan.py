"""The trainings of a sweep, the product of its lists, and their folder."""

import contextlib
import io
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from allstep.cli.run_folder import data_parallel, first_difference, make_folder
from allstep.cli.train import read_command_line
from allstep.cli.trainings import Training, check_folders, write_json
from allstep.errors import UsageError
from allstep.files import read_json
from allstep.recipes import AnyRecipe, recipe_from_plain, recipe_to_plain

_PLAN = "sweep.json"
_WHOLE = ("shares",)  # a value may have commas itself
_OF_ONE_RUN = {
    "run_dir": "each has a folder of its own below that of all",
    "resume": "what is finished or begun there is found without it",
    "elastic": "train such a run alone",
    "min_workers": "it goes with `--elastic`",
    "store": "it goes with `--elastic`",
    "restarts": "give the same command again, and it goes on",
    "doctor": "look before, by `allstep doctor`",
}
_OF_ALL = ("best_metric", "best_mode")  # what their table is sorted by


def read_axes(flags: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The flags with several values, by field, and the arguments of all others.

    >>> read_axes(["--lr", "0.1,0.2", "--epochs", "3", "--compile", "--optimizer=sgd,lamb"])
    ({'lr': ['0.1', '0.2'], 'optimizer': ['sgd', 'lamb']}, ['--epochs', '3', '--compile'])
    """
    axes: dict[str, list[str]] = {}
    others: list[str] = []
    seen: set[str] = set()
    words = list(flags)
    while words:
        flag, has_value, value = words.pop(0).partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        _check_flag(flag, name, seen)
        given = [flag] if not has_value else [f"{flag}={value}"]
        if not has_value and words and not words[0].startswith("--"):
            value = words.pop(0)
            given.append(value)
        if "," in value and name in _OF_ALL:
            raise UsageError(
                f"`{name}` (={value}) must be one for all trainings, whose table is sorted by it."
            )
        if "," in value and name not in _WHOLE:
            axes[name] = _split(name, value)
        else:
            others += given
    return axes, others


def _check_flag(flag: str, name: str, seen: set[str]) -> None:
    if name in _OF_ONE_RUN:
        raise UsageError(f"`{flag}` is of one run, not of several: {_OF_ONE_RUN[name]}.")
    if name in seen:
        raise UsageError(f"`{name}` is given twice; give a list: `{flag} VALUE,VALUE`.")
    if flag.startswith("--"):
        seen.add(name)


def _split(name: str, text: str) -> list[str]:
    values = [part.strip() for part in text.split(",")]
    if "" in values:
        raise UsageError(f"`{name}` (={text}) has an empty place; give values between commas.")
    twice = [value for number, value in enumerate(values) if value in values[:number]]
    if twice:
        raise UsageError(f"`{name}` (={text}) has {twice[0]} twice; give each value once.")
    return values


def make_plan(recipe_name: str, flags: Sequence[str], folder: Path) -> list[Training]:
    """The trainings of a command line, each checked as by `allstep train`.

    One for each combination of the flags' values, the last flag's changing first.
    """
    axes, others = read_axes(flags)
    trainings: list[Training] = []
    for combination in itertools.product(*axes.values()):
        chosen = dict(zip(axes, combination, strict=True))
        training = make_training(recipe_name, chosen, others, folder)
        same = [each.name for each in trainings if each.recipe == training.recipe]
        if same or training.name in {each.name for each in trainings}:
            raise UsageError(
                f"{training.name} and {(same or [training.name])[0]} are the same training; give"
                " each value once."
            )
        training.recipe.check()
        trainings.append(training)
    return trainings


def make_training(
    recipe_name: str, chosen: Mapping[str, str], others: Sequence[str], folder: Path
) -> Training:
    """One training, in a folder that is named by its values.

    Args:
        recipe_name: which recipe.
        chosen: values by field, in place of lists.
        others: the words of the flags that all trainings have.
        folder: of all trainings.
    """
    words = [_word(name.replace("_", "-"), value) for name, value in chosen.items()]
    with contextlib.redirect_stdout(io.StringIO()):  # what a large-batch recipe was rescaled to
        _, recipe = read_command_line(recipe_name, *others, *words)
    parts = [f"{name.replace('_', '-')}={value}" for name, value in chosen.items()]
    name = re.sub(r"[^\w.=,+-]", "_", ",".join(parts)) or "run"
    return Training(name, data_parallel(recipe), folder / name, chosen)


def _word(name: str, value: str) -> str:
    """A field's flag with its value; a switch without one."""
    switches = {"true": f"--{name}", "false": f"--no-{name}"}
    return switches.get(value, f"--{name}={value}")


def keep_plan(folder: Path, trainings: Sequence[Training], argument: str) -> None:
    """Makes the folder, or finds the same trainings in it.

    Args:
        folder: of the trainings.
        trainings: all of them.
        argument: what the caller names the folder, for messages.

    Raises:
        UsageError: if it holds other trainings or something else, one of them is being trained
            now, or it can't be written.
    """
    now = {each.name: each.recipe for each in trainings}
    _check_same(folder, now, argument)
    check_folders(trainings)
    make_folder(folder, argument)
    if not (folder / _PLAN).exists():
        runs = {name: recipe_to_plain(recipe) for name, recipe in now.items()}
        write_json(folder / _PLAN, {"runs": runs})


def _check_same(folder: Path, now: Mapping[str, AnyRecipe], argument: str) -> None:
    try:
        runs = read_json(folder / _PLAN)["runs"]
        before = {name: recipe_from_plain(plain) for name, plain in runs.items()}
    except FileNotFoundError:
        if folder.is_dir() and any(folder.iterdir()):
            raise UsageError(
                f"`{argument}` (={folder}) has other files, and no {_PLAN}; choose a new folder."
            ) from None
        return
    except NotADirectoryError:
        raise UsageError(f"`{argument}` (={folder}) is a file; give a folder.") from None
    except (ValueError, LookupError, TypeError, AttributeError, IsADirectoryError):
        raise UsageError(f"{folder / _PLAN} is damaged; choose a new folder.") from None
    for name in sorted(before.keys() | now.keys()):
        if name not in now or name not in before:
            differs = f"{name} is only in {'that' if name in before else 'this'} one"
        elif before[name] != now[name]:
            differs = first_difference(before[name], now[name])
        else:
            continue
        raise UsageError(
            f"`{argument}` (={folder}) holds another sweep ({differs}): give the same flags to go"
            " on with it, or choose another folder."
        )
