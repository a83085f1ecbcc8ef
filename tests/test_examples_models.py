"""The larger examples: one worker, two and three train the same models, in float64."""

import pytest
import torch

from allstep import Communicator
from examples import dcgan
from tests.helpers.compare import state_difference
from tests.helpers.generators import ThreadGenerator, thread_generators
from tests.helpers.ranks import run_ranks

__all__ = ["thread_generators"]

IMAGES = torch.randint(
    0, 255, (48, 1, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)


@pytest.mark.parametrize("staleness", [0, 1])
def test_dcgan_is_the_same_on_any_number_of_workers(
    thread_generators: type[ThreadGenerator], staleness: int
) -> None:
    options = dcgan.Options(
        epochs=2, global_batch=12, micro_batch=2, width=2, noise=3, staleness=staleness,
        dtype=torch.float64,
    )  # fmt: skip

    def work(comm: Communicator) -> list[dict[str, torch.Tensor]]:
        with thread_generators():
            return [net.state_dict() for net in dcgan.train(comm, IMAGES, options).nets]

    [lone] = run_ranks(1, work)
    for num_workers in (2, 3):
        for nets in run_ranks(num_workers, work):
            for net, lone_net in zip(nets, lone, strict=True):
                assert state_difference(net, lone_net) < 1e-10
