"""Which parameters are updated together."""

from typing import Any

import torch
from torch import nn

from allstep.optim.leaves import Leaf, batches


def leaf(group: dict[str, Any], *, is_exact: bool) -> Leaf:
    p = nn.Parameter(torch.ones(3))
    if is_exact:
        p.exact_squares = object()  # type: ignore[attr-defined]
    return Leaf("", group, p, p.detach(), torch.ones(3), {}, is_sharded=True)


def test_shards_of_exact_sums_are_in_batches_of_their_own() -> None:
    """torch's fused kernels, which they avoid, round others; and who has others, depends."""
    group: dict[str, Any] = {}
    kinds = [True, True, False, True, False, False]
    found = batches([leaf(group, is_exact=kind) for kind in kinds], 100)
    assert [len(batch.leaves) for batch in found] == [2, 1, 1, 2]
