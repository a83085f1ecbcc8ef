"""Reads the file of `allstep curve` for `allstep advise`."""

from pathlib import Path

from allstep.errors import UsageError
from allstep.files import read_json
from allstep.plan import Growth, Interval


def read_growth(path: Path, recipe: str | None) -> Growth:
    """The extrapolation of a learning curve beyond the present samples.

    Args:
        path: of a curve.json.
        recipe: what advice is asked for; None if it is no recipe.
    """
    try:
        plain = read_json(path)
        found = plain["recipe"]
        fit, twice = plain["newest_fit"], plain["twice_the_samples"]
        growth = Growth(
            num_samples=int(plain["num_samples"]),
            error=float(plain["all_samples"]["error"]),
            twice=float(twice["error"]),
            twice_interval=Interval(float(twice["low"]), float(twice["high"])),
            floor=None if fit["floor"] is None else float(fit["floor"]),
            floor_interval=Interval(**fit["floor_interval"]),
        )
    except OSError as error:
        raise UsageError(f"`curve` (={path}) can't be read ({error.strerror}).") from None
    except (ValueError, LookupError, TypeError):
        raise UsageError(
            f"`curve` (={path}) is no curve.json of `allstep curve`; give the one in its folder."
        ) from None
    if recipe not in (None, found):
        raise UsageError(
            f"`curve` (={path}) is of the recipe {found}, not of {recipe}; give one of"
            f" `allstep curve {recipe}`."
        )
    return growth
