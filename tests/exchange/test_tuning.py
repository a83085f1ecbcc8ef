"""The size of buckets, on links of which a clock of the test's own keeps the time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from allstep import Communicator
from allstep.exchange.reducer import NUM_AT_ONCE, Bucket
from allstep.exchange.tuning import (
    CANDIDATE_BYTES,
    NUM_PROBES,
    Clock,
    ReadyGradient,
    tuned_bucket_bytes,
)
from allstep.exchange.wires import FullPrecision

KIB = 1 << 10
LAYER_BYTES = 256 * KIB
BACKWARD_S = 0.16
GRADIENTS = [
    ReadyGradient(str(i), LAYER_BYTES, (torch.float32, torch.device("cpu")), 0.01 * (i + 1))
    for i in range(16)
]


class Link:
    """A clock, and a reducer whose buckets follow each other on one line.

    Args:
        seconds: of a bucket of so many bytes.
    """

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self._seconds = seconds
        self.wire = FullPrecision()
        self.now_s = self._free_s = 0.0
        self.sent: list[int] = []

    def start(self, bucket: Bucket, *, state: Any) -> "Sent":
        num_bytes = bucket.flat.nbytes
        self.sent.append(num_bytes)
        self._free_s = max(self._free_s, self.now_s) + self._seconds(num_bytes)
        return Sent(self, self._free_s)

    def wait_until(self, end_s: float) -> None:
        self.now_s = max(self.now_s, end_s)


@dataclass
class Sent:
    link: Link
    end_s: float

    def wait(self) -> None:
        self.link.wait_until(self.end_s)


def tuned(link: Link, gradients: Sequence[ReadyGradient] = GRADIENTS, **options: float) -> int:
    clock = Clock(lambda: link.now_s, lambda s: link.wait_until(link.now_s + s))
    comm = Communicator.single_process()
    return tuned_bucket_bytes(comm, link, gradients, BACKWARD_S, clock=clock, **options)  # type: ignore[arg-type]


def test_tuning_follows_the_model_of_the_link() -> None:
    """Small buckets when a byte costs all of the time, large ones when a message does."""
    assert tuned(Link(lambda n: n / 20e6)) == LAYER_BYTES
    assert tuned(Link(lambda n: 0.1)) == 128 << 20


def test_tuning_replays_close_contenders() -> None:
    """Both probes say that latency is nothing; but buckets of one layer are slow, by chance."""
    link = Link(lambda n: n / 20e6 + 0.02 * (n == LAYER_BYTES))
    assert tuned(link) == 2 * LAYER_BYTES


def test_tuning_skips_replays_of_a_hidden_exchange() -> None:
    num_probes = 2 * NUM_PROBES * NUM_AT_ONCE
    hidden, exposed = Link(lambda n: n / 2e9), Link(lambda n: n / 20e6)
    tuned(hidden)
    tuned(exposed)
    assert len(hidden.sent) == num_probes
    assert LAYER_BYTES in exposed.sent[num_probes:]


def test_tuning_skips_replays_that_take_too_long() -> None:
    def seconds(num_bytes: int) -> float:
        return 0.5 + num_bytes / 0.25e6 + 30.0 * (num_bytes > 2 << 20)

    slow = Link(seconds)
    assert tuned(slow) == 128 << 20  # as modelled
    assert len(slow.sent) == 2 * NUM_PROBES * NUM_AT_ONCE
    assert tuned(Link(seconds), longest_s=1e3) == 2 << 20


def test_tuning_with_an_empty_bucket() -> None:
    """A parameter may be empty."""
    empty = [ReadyGradient("none", 0, GRADIENTS[0].kind)]
    assert tuned(Link(lambda n: n / 20e6), empty) in CANDIDATE_BYTES
