"""A share of a data set, for trainings on less of it."""

from typing import Any

from torch.utils.data import Dataset, Subset

from allstep.data.fetch import is_map_style, not_map_style
from allstep.data.random import derive_permutation
from allstep.errors import check_share

_NO_EPOCH = -1  # (seed, 0), (seed, 1), ... are the orders of the epochs


def subset(dataset: Dataset[Any], share: float, *, seed: int = 0) -> Dataset[Any]:
    """A random share of a data set, the same on every worker; a smaller share is part of a larger.

    The first round(share * N) samples, at least one, of a permutation that `seed` stands for.

    Args:
        dataset: map-style, of N samples.
        share: above 0 and at most 1, which is the data set itself.
        seed: of the permutation.

    Returns:
        What `allstep.data.loader` takes on any number of workers.

    Raises:
        UsageError: if `share` is out of range, or the data set is not map-style.

    >>> half, quarter = (subset(range(8), share) for share in (0.5, 0.25))
    >>> list(half), list(quarter)
    ([0, 7, 4, 3], [0, 7])
    """
    check_share("share", share, "(0, 1]", "1 is all of the data set")
    if not is_map_style(dataset):
        raise not_map_style(dataset)
    if share == 1:
        return dataset
    num_samples = len(dataset)  # type: ignore[arg-type]
    order = derive_permutation(num_samples, seed, _NO_EPOCH)
    return Subset(dataset, order[: subset_size(num_samples, share)].tolist())


def subset_size(num_samples: int, share: float) -> int:
    """How many samples `subset` takes of so many.

    Args:
        num_samples: of the data set.
        share: as for `subset`.

    Returns:
        round(share * num_samples), or 1 if that is 0.

    >>> subset_size(8, 0.25), subset_size(8, 0.001)
    (2, 1)
    """
    return max(1, round(share * num_samples))
