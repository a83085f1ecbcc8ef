"""What ranks that are threads draw is each one's own, whatever draws it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from allstep import Communicator
from tests.helpers.ranks import run_ranks

ONES = torch.ones(2, 3, 8)
DRAWS: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand(9),
    "randn_like": lambda: torch.randn_like(ONES),
    "randint": lambda: torch.randint(1000, (9,)),
    "randperm": lambda: torch.randperm(50),
    "normal": lambda: torch.normal(ONES, ONES),
    "bernoulli": lambda: torch.bernoulli(ONES / 2),
    "multinomial": lambda: torch.multinomial(torch.ones(50), 9),
    "poisson": lambda: torch.poisson(9 * ONES),
    "exponential": lambda: ONES.clone().exponential_(),
    "dirichlet": lambda: torch.distributions.Dirichlet(ONES).sample(),
    "dropout": lambda: functional.dropout(ONES, 0.5),
    "native_dropout": lambda: torch.native_dropout(ONES, 0.5, True)[0],
    "rrelu": lambda: functional.rrelu(-ONES, training=True),
    "attention": lambda: functional.scaled_dot_product_attention(ONES, ONES, ONES, dropout_p=0.5),
    "initial values": lambda: nn.Linear(8, 8).weight.detach(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_ranks_draw_their_own_numbers(draw: Callable[[], Tensor]) -> None:
    """A rank's don't depend on the process's state, and leave it as it is."""

    def draw_on(comm: Communicator) -> Tensor:
        return draw()

    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, other = run_ranks(2, draw_on)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(one, other)
    torch.manual_seed(2)
    assert torch.equal(run_ranks(1, draw_on)[0], one)
    assert not torch.equal(run_ranks(1, draw_on, seed=7)[0], one)
