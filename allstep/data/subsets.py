"""Takes a share of a data set, for trainings on less data."""

from typing import Any

from torch.utils.data import Dataset, Subset

from allstep.data.fetch import is_map_style, not_map_style
from allstep.data.random import derive_permutation
from allstep.errors import check_share

_NO_EPOCH = -1  # (seed, 0), (seed, 1), ... are seeds of the epochs' orders


def subset(dataset: Dataset[Any], share: float, *, seed: int = 0) -> Dataset[Any]:
    """A random share of a data set, the same on every worker; larger shares contain smaller ones.

    It is the first round(share * N) samples, at least one, of a permutation seeded by `seed`.

    Args:
        dataset: a map-style data set of N samples.
        share: the share, above 0 and at most 1, which is the data set itself.
        seed: seed of the permutation.

    Returns:
        A data set for `allstep.data.loader`.

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
    """The number of samples of `subset`.

    Args:
        num_samples: samples of the whole data set.
        share: as for `subset`.

    Returns:
        round(share * num_samples), or 1 if that is 0.

    >>> subset_size(8, 0.25), subset_size(8, 0.001)
    (2, 1)
    """
    return max(1, round(share * num_samples))
