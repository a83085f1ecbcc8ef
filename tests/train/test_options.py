"""Training options choose the exchange policy's type."""

import pytest

from allstep import ExchangePolicy, LocalSGD, Stale, Synchronous, TrainOptions
from allstep.errors import UsageError


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({}, Synchronous()),
        ({"compression": "fp16"}, Synchronous(compression="fp16")),
        ({"staleness": 2, "compression": "int8"}, Stale(steps=2, compression="int8")),
        ({"sync_every": 16}, LocalSGD(sync_every=16, average_optimizer_state=True)),
        (
            {"algorithm": "ring", "bucket_bytes": "auto"},
            Synchronous(algorithm="ring", bucket_bytes="auto"),
        ),
    ],
)
def test_options_become_a_policy(options: dict, policy: ExchangePolicy) -> None:
    assert TrainOptions(**options).exchange_policy == policy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"staleness": 1, "sync_every": 16},
            r"`staleness` \(=1\) and `sync_every` \(=16\) exclude each other: .*Leave one of them",
        ),
        ({"staleness": -1}, r"`staleness` \(=-1\) must be at least 0"),
        ({"sync_every": 0}, r"`sync_every` \(=0\) must be at least 1"),
        ({"compression": "fp61"}, r"`compression` \(='fp61'\): did you mean `fp16`"),
        ({"sync_every": 4, "compression": "int8"}, r"`compression` \(='int8'\) is for gradients"),
    ],
)
def test_options_without_a_policy_are_refused(options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainOptions(**options)


def test_the_base_is_no_policy() -> None:
    with pytest.raises(TypeError, match="abstract"):
        ExchangePolicy()
